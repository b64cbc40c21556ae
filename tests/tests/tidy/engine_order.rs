//! The order of the engine's modules: each calls only those above it in the table of `overlay/engine/src/lib.rs`.
//!
//! The calls are found in the text: those of methods of the engine (`self.fetch(…)`, `inner.fetch(…)`), of its components
//! (`inner.space.evictor.insert(…)`), of [`Txn`], and of functions that are named by their path or by `use`.

use std::collections::{BTreeMap, BTreeSet};

const SRC: &str = "overlay/engine/src/";
/// What stands for the engine or a change before a method call. `self` counts in the `impl` blocks of both.
const RECEIVERS: [&str; 9] = ["self", "inner", "overlay", "engine", "again", "inner()", "txn", "Inner", "Overlay"];

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the last word of a text, and what is before it.
fn last_word(text: &str) -> (&str, &str) {
    text.split_at(text.rfind(|c| !is_word(c)).map_or(0, |end| end + 1))
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

/// The type of an `impl` block that begins on this line; an empty one after its end.
fn implemented(line: &str) -> Option<&str> {
    if line == "}" {
        return Some("");
    }
    let mut rest = line.strip_prefix("impl")?;
    if rest.starts_with('<') {
        rest = rest.split_once('>')?.1;
    }
    let rest = rest.split_once(" for ").map_or(rest, |(_, of)| of).trim_start();
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

/// A call of a method: `receiver.field.method(`.
struct Call<'a> {
    receiver: &'a str,
    /// The component, if it is not a method of the receiver itself.
    component: Option<&'a str>,
    method: &'a str,
}

fn calls(line: &str) -> impl Iterator<Item = Call<'_>> {
    line.match_indices('(').filter_map(|(at, _)| {
        let (mut before, method) = last_word(&line[..at]);
        let mut component = None;
        loop {
            before = before.strip_suffix('.').or_else(|| before.strip_suffix("::"))?;
            let (rest, word) = last_word(before.strip_suffix("()").unwrap_or(before));
            let receiver = &before[rest.len()..];
            let is_field = rest.ends_with('.');
            if RECEIVERS.contains(&receiver) && (!is_field || matches!(receiver, "inner" | "inner()")) {
                return (!method.is_empty()).then_some(Call { receiver, component, method });
            }
            if !is_field || receiver != word {
                return None;
            }
            (component, before) = (Some(word), rest);
        }
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

/// What the engine's source defines.
struct Engine {
    table: Vec<String>,
    /// The file and its text.
    files: Vec<(String, String)>,
    /// The methods of `Inner` and `Overlay`, and those of `Txn`: a name that two of them have counts for the first.
    methods: BTreeMap<String, usize>,
    changes: BTreeMap<String, usize>,
    /// The fields of `Inner`, each with the folder of its type.
    components: BTreeMap<String, String>,
}

impl Engine {
    fn read() -> Self {
        let mut files = super::sources();
        files.retain(|(name, _)| name.starts_with(SRC) && !name.ends_with("tests.rs"));
        let (_, lib) = files.iter().find(|(name, _)| name.ends_with("src/lib.rs")).unwrap();
        let table = table(lib);
        let fields = lib.split("struct Inner {").nth(1).unwrap().split("\n}").next().unwrap().lines();
        let fields = fields.filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(": "));
        let mut components: BTreeMap<String, String> = fields
            .filter_map(|(field, of)| {
                let module = of.trim_start_matches("Arc<").split_once("::")?.0;
                lib.contains(&format!("\nmod {module};")).then(|| (field.to_owned(), module.to_owned()))
            })
            .collect();
        components.insert("table".to_owned(), "node".to_owned());
        let (mut methods, mut changes) = (BTreeMap::new(), BTreeMap::new());
        for (file, text) in &files {
            let mut of = "";
            for line in code(text) {
                of = implemented(line).unwrap_or(of);
                let methods = match of {
                    "Inner" | "Overlay" => &mut methods,
                    "Txn" => &mut changes,
                    _ => continue,
                };
                if let (Some(name), Some(place)) = (defined(line), place(&table, file)) {
                    let known = methods.entry(name.to_owned()).or_insert(place);
                    *known = place.min(*known);
                }
            }
        }
        Self { table, files, methods, changes, components }
    }

    fn has(&self, module: &str) -> bool {
        self.files.iter().any(|(name, _)| *name == format!("{SRC}{module}.rs"))
    }

    /// The place of a component's method: of the first file in its folder that defines it, else of its first file.
    fn of_component(&self, component: &str, method: &str) -> Option<usize> {
        let folder = format!("{SRC}{}", self.components.get(component)?);
        let is_in = |name: &str| name.strip_prefix(&folder).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'));
        let files = || self.files.iter().filter(|(name, _)| is_in(name));
        let defines = |text: &str| code(text).iter().any(|line| defined(line) == Some(method));
        let places = files().filter(|(_, text)| defines(text)).filter_map(|(name, _)| place(&self.table, name));
        places.min().or_else(|| files().filter_map(|(name, _)| place(&self.table, name)).min())
    }

    /// The place that a call leads to, from an `impl` block of the type `of`.
    fn target(&self, call: &Call<'_>, of: &str) -> Option<usize> {
        let of_change = match call.receiver {
            "self" if matches!(of, "Inner" | "Overlay") => false,
            "self" if of == "Txn" => true,
            "self" => return None,
            receiver => receiver == "txn",
        };
        match call.component {
            Some("inner") | None => match of_change && call.component.is_none() {
                true => self.changes.get(call.method).copied(),
                false => self.methods.get(call.method).copied(),
            },
            // Fields of a change are its own.
            Some(_) if of_change => None,
            Some(component) => self.of_component(component, call.method),
        }
    }
}

#[test]
fn modules_of_the_engine_call_only_those_above_them() {
    let engine = Engine::read();
    let Engine { table, files, methods, changes, components } = &engine;
    let unplaced: Vec<_> = files.iter().map(|(name, _)| name).filter(|name| place(table, name).is_none()).collect();
    assert!(unplaced.is_empty(), "not in the table of {SRC}lib.rs: {unplaced:?}");
    let names: BTreeSet<_> = table.iter().collect();
    assert!(names.len() == table.len(), "a module is in the table of {SRC}lib.rs twice");
    let unknown: Vec<_> = names.into_iter().filter(|name| !engine.has(name)).collect();
    assert!(unknown.is_empty(), "in the table of {SRC}lib.rs, but there is no such module: {unknown:?}");
    // Otherwise the search has lost its way, and finds nothing wrong either.
    assert!(
        methods.len() > 400 && changes.len() > 20 && components.len() > 15,
        "{methods:?} {changes:?} {components:?}"
    );

    let (mut found, mut wrong) = (0, BTreeSet::new());
    for (file, text) in files {
        let own = place(table, file).unwrap();
        let mut check = |what: &str, to: usize| {
            found += 1;
            if to > own {
                wrong.insert(format!("{file} calls {what} of {}", table[to]));
            }
        };
        let mut of = "";
        for line in code(text) {
            of = implemented(line).unwrap_or(of);
            for call in calls(line) {
                if let Some(to) = engine.target(&call, of) {
                    check(call.method, to);
                }
            }
        }
        for (module, function) in functions(file, &code(text).join("\n")) {
            let is_module = engine.has(&format!("{module}/{function}")) || engine.has(&function);
            if engine.has(&module) && !is_module {
                check(&function, place(table, &format!("{SRC}{module}.rs")).unwrap());
            }
        }
    }
    assert!(found > 1500, "only {found} calls were found");
    let wrong: Vec<_> = wrong.into_iter().collect();
    assert!(wrong.is_empty(), "calls of modules that are below in the table:\n{}", wrong.join("\n"));
}
