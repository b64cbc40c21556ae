//! The order of the engine's modules: each calls only those above it in the table of `overlay/engine/src/lib.rs`.

use std::collections::BTreeMap;

const SRC: &str = "overlay/engine/src/";
/// What stands for the engine before a method call. `self` counts in `impl Inner` and `impl Overlay` alone.
const ENGINE: [&str; 8] = ["self", "inner", "overlay", "engine", "again", "inner()", "Inner", "Overlay"];

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The part of a source file that ships, without comments.
fn code(text: &str) -> Vec<&str> {
    super::shipped(text).lines().map(|line| line.split("//").next().unwrap_or_default()).collect()
}

/// The modules of the table, in its order.
fn table(lib: &str) -> Vec<String> {
    let rows = lib.lines().filter_map(|line| line.strip_prefix("//! | `"));
    let cells = rows.filter_map(|row| row.split(" | ").next());
    cells.flat_map(|cell| cell.split(", ").map(|name| name.trim_matches('`').to_owned())).collect()
}

/// The place of a file in the table: that of the longest name which is a prefix of its path.
fn place(table: &[String], file: &str) -> Option<usize> {
    let path = file.strip_prefix(SRC)?.strip_suffix(".rs")?;
    let is_in = |name: &str| path.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let names = table.iter().enumerate().filter(|(_, name)| is_in(name));
    names.max_by_key(|(_, name)| name.len()).map(|(place, _)| place)
}

/// The type of an `impl` block that begins on this line.
fn implemented(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl")?.trim_start_matches(|c| c != ' ').trim_start();
    let rest = rest.split_once(" for ").map_or(rest, |(_, of)| of);
    let name = rest.split(|c: char| !is_word(c) && c != ':').next()?;
    name.rsplit("::").next()
}

/// The method that a line of an `impl` block begins to define.
fn defined(line: &str) -> Option<&str> {
    let signature = line.strip_prefix("    ").filter(|rest| !rest.starts_with(' '))?;
    let (before, name) = signature.split_once("fn ")?;
    let is_signature = before.split(' ').all(|word| matches!(word, "" | "const" | "async") || word.starts_with("pub"));
    is_signature.then(|| name.split(|c| !is_word(c)).next())?
}

/// The methods that a line calls of what may be the engine, and whether each is called of `self`.
fn called(line: &str) -> impl Iterator<Item = (&str, bool)> {
    line.match_indices('(').filter_map(|(at, _)| {
        let before = &line[..at];
        let name = &before[before.rfind(|c| !is_word(c)).map_or(0, |end| end + 1)..];
        let receiver = before.strip_suffix(name)?;
        let receiver = receiver.strip_suffix('.').or_else(|| receiver.strip_suffix("::"))?;
        let start = receiver.trim_end_matches("()").rfind(|c| !is_word(c)).map_or(0, |end| end + 1);
        let receiver = &receiver[start..];
        ENGINE.contains(&receiver).then_some((name, receiver == "self"))
    })
}

/// The modules below `src` that a file names with functions in them, by `use` or by a path.
fn functions(file: &str, code: &str) -> Vec<(String, String)> {
    let path = file.strip_prefix(SRC).unwrap().strip_suffix(".rs").unwrap();
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::").chain(code.match_indices("super::")) {
        if code[..at].ends_with(|c: char| is_word(c) || c == ':') {
            continue;
        }
        let mut module: Vec<&str> = if path == "lib" { Vec::new() } else { path.split('/').collect() };
        let mut rest = &code[at..];
        let items = loop {
            let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            match (&rest[..end], rest[end..].strip_prefix("::")) {
                ("", _) => break rest.strip_prefix('{').map_or("", |list| list.split('}').next().unwrap_or_default()),
                (item, None) => break item,
                ("crate", Some(next)) => (module, rest) = (Vec::new(), next),
                ("super", Some(next)) => (_, rest) = (module.pop(), next),
                (name, Some(next)) => (_, rest) = (module.push(name), next),
            }
        };
        for item in items.split(',').map(str::trim).filter(|item| item.starts_with(|c: char| c.is_ascii_lowercase())) {
            found.push((module.join("/"), item.to_owned()));
        }
    }
    found
}

#[test]
fn modules_of_the_engine_call_only_those_above_them() {
    let mut files = super::sources();
    files.retain(|(name, _)| name.starts_with(SRC) && !name.ends_with("tests.rs"));
    let (_, lib) = files.iter().find(|(name, _)| name.ends_with("src/lib.rs")).unwrap();
    let table = table(lib);
    assert!(table.len() > 40, "only {} modules are in the table", table.len());
    let unplaced: Vec<_> = files.iter().map(|(name, _)| name).filter(|name| place(&table, name).is_none()).collect();
    assert!(unplaced.is_empty(), "not in the table of {SRC}lib.rs: {unplaced:?}");
    let exists = |module: &str| files.iter().any(|(name, _)| *name == format!("{SRC}{module}.rs"));

    // A method that both `Inner` and `Overlay` have counts for the first of the two.
    let mut methods = BTreeMap::new();
    for (file, text) in &files {
        let mut of_engine = false;
        for line in code(text) {
            if let Some(name) = implemented(line) {
                of_engine = matches!(name, "Inner" | "Overlay");
            } else if let (true, Some(name)) = (of_engine, defined(line)) {
                let known = methods.entry(name).or_insert(usize::MAX);
                *known = place(&table, file).unwrap().min(*known);
            }
        }
    }
    assert!(methods.len() > 400, "only {} methods were found", methods.len());

    let (mut calls, mut wrong) = (0, Vec::new());
    for (file, text) in &files {
        let own = place(&table, file).unwrap();
        let mut check = |what: &str, to: usize| {
            calls += 1;
            if to > own {
                wrong.push(format!("{file} calls {what} of {}", table[to]));
            }
        };
        let mut of_engine = false;
        for line in code(text) {
            of_engine = implemented(line).map_or(of_engine, |name| matches!(name, "Inner" | "Overlay"));
            for (name, is_self) in called(line) {
                if let (true, Some(to)) = (of_engine || !is_self, methods.get(name)) {
                    check(name, *to);
                }
            }
        }
        for (module, function) in functions(file, &code(text).join("\n")) {
            if exists(&module) && !exists(&format!("{module}/{function}")) {
                check(&function, place(&table, &format!("{SRC}{module}.rs")).unwrap());
            }
        }
    }
    assert!(calls > 1000, "only {calls} calls were found");
    assert!(wrong.is_empty(), "calls of modules that are below in the table:\n{}", wrong.join("\n"));
}
