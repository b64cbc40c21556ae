//! The reads of a program as `strace` sees them, to check what the observer sees.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use crate::reading::PAGE;

/// The system calls that open, read, move or map. A call that reads in a way that is not followed fails the test.
const CALLS: &str = "open,openat,creat,execve,read,pread64,lseek,write,pwrite64,ftruncate,mmap,dup,dup2,dup3,fcntl,\
                     readv,preadv,preadv2,sendfile,splice,copy_file_range";

/// The use of one file below the traced directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Used {
    pub opens: u64,
    /// The bytes of the pages that calls read. A page counts each time that it is read.
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// The file was mapped or executed. `strace` does not show which pages of it were touched.
    pub is_mapped: bool,
}

/// Returns the words that go before a command to trace it into `dir`, one file for each process.
pub fn words(dir: &Path) -> Vec<String> {
    let traces = dir.join("trace").display().to_string();
    let words = ["strace", "-ff", "-qq", "-y", "-s", "0", "-e", "signal=none", "-e", CALLS, "-o", &traces];
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Returns what the traced processes, which ran in `root`, used of each file below it, by relative path.
pub fn used(dir: &Path, root: &Path) -> BTreeMap<PathBuf, Used> {
    let mut all = BTreeMap::new();
    for trace in fs::read_dir(dir).unwrap() {
        let text = fs::read_to_string(trace.unwrap().path()).unwrap();
        let mut process = Process { root, offsets: HashMap::new(), sizes: HashMap::new(), all: &mut all };
        text.lines().for_each(|line| process.line(line));
    }
    all
}

struct Process<'a> {
    root: &'a Path,
    /// The offsets of the descriptors that this process opened.
    offsets: HashMap<u64, u64>,
    /// The sizes of the files that this process creates or truncates. A read counts only up to the size at that moment.
    sizes: HashMap<String, u64>,
    all: &'a mut BTreeMap<PathBuf, Used>,
}

impl Process<'_> {
    fn line(&mut self, line: &str) {
        let Some((call, rest)) = line.split_once('(') else { return };
        let Some((arguments, result)) = rest.rsplit_once(" = ") else { return };
        let (Some(done), returned) = (number(result), descriptor(result)) else { return };
        if call == "execve" {
            let program = arguments.split('"').nth(1).unwrap();
            // The program runs in `root`, so a relative path begins there.
            if let Ok(path) = self.root.join(program).strip_prefix(self.root) {
                let path = path.strip_prefix(".").unwrap_or(path);
                self.all.entry(path.to_owned()).or_default().is_mapped = true;
            }
            return;
        }
        if let ("open" | "openat" | "creat", Some((fd, path))) = (call, &returned) {
            self.offsets.insert(*fd, 0);
            if call == "creat" || arguments.contains("O_TRUNC") {
                self.sizes.insert(path.clone(), 0);
            }
            let opens = !["O_DIRECTORY", "O_PATH"].iter().any(|flag| arguments.contains(flag));
            if let (true, Some(used)) = (opens, self.of(path)) {
                used.opens += 1;
            }
            return;
        }
        // The descriptor is the fifth argument of mmap, and the first one of all other calls.
        let at = if call == "mmap" { arguments.splitn(5, ", ").nth(4).unwrap_or_default() } else { arguments };
        let Some((fd, path)) = descriptor(at) else { return };
        let offset = self.offsets.get(&fd).copied();
        let here = self.of(&path).is_some();
        let offset = || offset.unwrap_or_else(|| panic!("{line}: opened by another process"));
        let last = || number(arguments.trim_end_matches(')').rsplit(", ").next().unwrap()).unwrap();
        match call {
            "dup" | "dup2" | "dup3" | "fcntl" => {
                if let (Some((new, _)), Some(at)) = (returned, self.offsets.get(&fd).copied()) {
                    self.offsets.insert(new, at);
                }
            }
            "lseek" => {
                self.offsets.insert(fd, done);
            }
            _ if !here => {}
            "read" => {
                let from = offset();
                self.read(&path, from, done);
                self.offsets.insert(fd, from + done);
            }
            "pread64" => self.read(&path, last(), done),
            "write" => {
                let from = offset();
                self.write(&path, from, done);
                self.offsets.insert(fd, from + done);
            }
            "pwrite64" => self.write(&path, last(), done),
            "ftruncate" => {
                self.sizes.insert(path, last());
            }
            "mmap" => self.of(&path).unwrap().is_mapped = true,
            _ => panic!("{line}: a way to read that is not followed"),
        }
    }

    fn read(&mut self, path: &str, from: u64, len: u64) {
        if len > 0 {
            let size = || fs::metadata(path).map_or(u64::MAX, |stat| stat.len());
            let size = self.sizes.get(path).copied().unwrap_or_else(size);
            let until = ((from + len).div_ceil(PAGE) * PAGE).min(size);
            self.of(path).unwrap().read_bytes += until - from / PAGE * PAGE;
        }
    }

    fn write(&mut self, path: &str, from: u64, len: u64) {
        self.of(path).unwrap().written_bytes += len;
        if let Some(size) = self.sizes.get_mut(path) {
            *size = (*size).max(from + len);
        }
    }

    fn of(&mut self, path: &str) -> Option<&mut Used> {
        let path = Path::new(path).strip_prefix(self.root).ok()?;
        Some(self.all.entry(path.to_owned()).or_default())
    }
}

/// Returns the number and the path of `3</a/path>`.
fn descriptor(text: &str) -> Option<(u64, String)> {
    let (fd, rest) = text.split_once('<')?;
    Some((fd.parse().ok()?, rest.split_once('>')?.0.to_owned()))
}

/// Returns the number that a text begins with, unless it is negative.
fn number(text: &str) -> Option<u64> {
    let (digits, radix) = text.strip_prefix("0x").map_or((text, 10), |rest| (rest, 16));
    let end = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
    u64::from_str_radix(&digits[..end], radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_followed_from_the_open_on() {
        let dir = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a");
        fs::write(&path, [0; 10_000]).unwrap();
        let file = path.display();
        let lines = [
            format!("openat(AT_FDCWD</>, \"a\", O_RDONLY) = 3<{file}>"),
            format!("read(3<{file}>, \"\"..., 10) = 10"),
            format!("read(3<{file}>, \"\"..., 8192) = 8192"),
            format!("lseek(3<{file}>, 0, SEEK_END) = 10000"),
            format!("read(3<{file}>, \"\", 10) = 0"),
            format!("pread64(3<{file}>, \"\"..., 4096, 4096) = 4096"),
            "openat(AT_FDCWD</>, \"b\", O_RDONLY) = -1 ENOENT (No such file or directory)".to_owned(),
            "read(0</dev/null>, \"\", 10) = 0".to_owned(),
            "+++ exited with 0 +++".to_owned(),
        ];
        fs::write(dir.path().join("trace.1"), lines.join("\n")).unwrap();
        let used = used(dir.path(), root.path());
        // One page; three pages, the last of which ends with the file; one page.
        let expected = Used { opens: 1, read_bytes: 4096 + 10_000 + 4096, ..Used::default() };
        assert_eq!(used, BTreeMap::from([(PathBuf::from("a"), expected)]));
    }
}
