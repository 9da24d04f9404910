//! The house rules, as a test: what reviewers would otherwise have to look for.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longest file in lines: one noun a file.
const FILE_LINES_MAX: usize = 700;
/// Longest function in lines outside tests.
const FUNCTION_LINES_MAX: usize = 60;
/// Files that a remote fault without surprises passes, and lines of code of the functions there.
const PATH_FILES_MAX: usize = 10;
const PATH_LINES_MAX: usize = 700;
/// `unwrap()` outside tests, a crate: each was argued for. Lower it when one goes; never raise it.
const UNWRAPS_MAX: [(&str, usize); 4] =
    [("policy", 0), ("transport", 0), ("agent", 0), ("pager", 0)];
/// Licences of dependencies that may be shipped; deny.toml says the same to cargo-deny.
const LICENCES: [&str; 12] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "MIT",
    "MIT-0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "ISC",
    "Zlib",
    "Unlicense",
    "Unicode-3.0",
    "CDLA-Permissive-2.0",
];

/// One crate each that has another licence: deny.toml says why.
const EXCEPTIONS: [(&str, &str); 1] = [("foca", "MPL-2.0")];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_path_buf()
}

struct Source {
    path: String,
    text: String,
}

impl Source {
    /// The lines but for those of what only tests compile: what ships. By rustfmt's layout an item ends at its first line that is no deeper than
    /// its attribute and ends with a closing brace or a semicolon.
    fn shipped(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut within = None;
        let lines = self.text.lines().enumerate().filter(move |(_, line)| {
            let depth = line.len() - line.trim_start().len();
            match within {
                None if line.trim_start().starts_with("#[cfg(test)]") => within = Some(depth),
                None => return true,
                Some(outer) if depth == outer && line.ends_with(['}', ';', ',']) => within = None,
                Some(_) => {}
            }
            false
        });
        lines.map(|(i, line)| (i + 1, line))
    }

    fn is_rust_of(&self, krate: &str) -> bool {
        self.path.ends_with(".rs") && self.path.starts_with(&format!("{krate}/src/"))
    }
}

/// Every tracked text file.
fn sources() -> Vec<Source> {
    let output = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output()
        .expect("git ls-files");
    assert!(output.status.success(), "git: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("names of files");
    let sources: Vec<Source> = names
        .split('\0')
        .filter(|name| !name.is_empty())
        .filter_map(|name| {
            let text = fs::read_to_string(root().join(name)).ok()?;
            Some(Source { path: name.to_string(), text })
        })
        .collect();
    assert!(sources.len() > 20, "git ls-files lists the sources");
    sources
}

/// Fails with all findings at once.
fn report(rule: &str, findings: Vec<String>) {
    assert!(findings.is_empty(), "{rule}:\n  {}", findings.join("\n  "));
}

#[test]
fn files_are_short() {
    let long = |source: &Source| {
        let lines = source.text.lines().count();
        let generated = source.path.ends_with("Cargo.lock");
        (lines > FILE_LINES_MAX && !generated).then(|| format!("{}: {lines} lines", source.path))
    };
    report("files stay under 700 lines", sources().iter().filter_map(long).collect());
}

/// Functions by rustfmt's layout: from a line with `fn` to the closing brace at the same depth.
fn long_functions(source: &Source) -> Vec<String> {
    let lines: Vec<(usize, &str)> = source.shipped().collect();
    let mut findings = Vec::new();
    for (i, (number, line)) in lines.iter().enumerate() {
        let code = line.trim_start();
        let depth = line.len() - code.len();
        let head = code.split('(').next().unwrap_or_default();
        if !head.split_whitespace().any(|word| word == "fn") || code.starts_with("//") {
            continue;
        }
        let end = format!("{}}}", " ".repeat(depth));
        let length = lines[i..].iter().position(|(_, line)| *line == end).unwrap_or(0) + 1;
        // A body on one line, or a declaration without one, ends where it begins.
        if length > FUNCTION_LINES_MAX && !code.ends_with(['}', ';']) {
            findings.push(format!("{}:{number}: {length} lines: {}", source.path, head.trim()));
        }
    }
    findings
}

#[test]
fn functions_are_short() {
    let rust = sources().into_iter().filter(|source| source.path.ends_with(".rs"));
    report(
        "functions stay under 60 lines",
        rust.flat_map(|source| long_functions(&source)).collect(),
    );
}

/// Lines of code of all functions of this name in what a file ships, if there are any.
fn lines_of_functions(source: &Source, name: &str) -> Option<usize> {
    let lines: Vec<&str> = source.shipped().map(|(_, line)| line).collect();
    let mut found = None;
    for (i, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let is_it = code.split_once("fn ").is_some_and(|(before, after)| {
            let named = after.split(|c: char| !c.is_alphanumeric() && c != '_').next();
            !before.contains("//") && named == Some(name)
        });
        // A declaration without a body passes nothing.
        if !is_it || code.ends_with(';') {
            continue;
        }
        let end = format!("{}}}", " ".repeat(line.len() - code.len()));
        let length = lines[i..].iter().position(|line| *line == end).unwrap_or(0) + 1;
        let length = if code.ends_with('}') { 1 } else { length };
        let is_code = |line: &&&str| !line.trim().is_empty() && !line.trim().starts_with("//");
        let code = lines[i..i + length].iter().filter(is_code).count();
        *found.get_or_insert(0) += code;
    }
    found
}

/// The functions that a document's table of a path names, by file.
fn path_in(document: &str) -> BTreeMap<String, BTreeSet<String>> {
    let document = fs::read_to_string(root().join(document)).expect("a document");
    let mut path: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in document.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let link = cells.get(3).and_then(|cell| cell.split_once("](../"));
        let Some(file) = link.and_then(|(_, link)| link.strip_suffix(')')) else { continue };
        let functions = cells[2].split('`').skip(1).step_by(2);
        let functions = functions.filter_map(|name| name.rsplit("::").next()).map(str::to_owned);
        path.entry(file.to_owned()).or_default().extend(functions);
    }
    path
}

#[test]
fn functions_on_the_paths_of_agent_and_transport_are_there() {
    let (sources, mut findings) = (sources(), Vec::new());
    for document in ["docs/agent.md", "docs/transport.md"] {
        let path = path_in(document);
        assert!(path.len() > 3, "the table of {document} is found");
        for (file, functions) in path {
            let source = sources.iter().find(|source| source.path == file).expect("a source");
            let there = |name: &&String| lines_of_functions(source, name).is_some();
            let missing = functions.iter().filter(|name| !there(name));
            findings.extend(missing.map(|name| format!("{document}: {file} has no {name}")));
        }
    }
    report("what documents name is there", findings);
}

/// The table of docs/fault.md: a fault's path stays as short as it says, and its functions are there.
#[test]
fn the_path_of_a_fault_is_short() {
    let path = path_in("docs/fault.md");
    let sources = sources();
    let (mut findings, mut lines) = (Vec::new(), 0);
    for (file, functions) in &path {
        let source = sources.iter().find(|source| source.path == *file).expect("a source");
        for function in functions {
            match lines_of_functions(source, function) {
                Some(count) => lines += count,
                None => findings.push(format!("{file} has no {function}")),
            }
        }
    }
    if path.len() > PATH_FILES_MAX || lines > PATH_LINES_MAX {
        findings.push(format!("{} files, {lines} lines", path.len()));
    }
    assert!(lines > PATH_LINES_MAX / 2, "the functions are found: {lines} lines");
    report("the path of a fault is what docs/fault.md says, and short", findings);
}

fn lines_with(words: &[String], but: &[&str]) -> Vec<String> {
    let mut findings = Vec::new();
    for source in sources().iter().filter(|source| !but.contains(&source.path.as_str())) {
        for (i, line) in source.text.lines().enumerate() {
            if words.iter().any(|word| line.contains(word)) {
                findings.push(format!("{}:{}: {}", source.path, i + 1, line.trim()));
            }
        }
    }
    findings
}

// The words are put together here so that this file does not find itself.

#[test]
fn what_ships_is_all_but_tests() {
    let text = "a\n#[cfg(test)]\nmod tests;\nb\nimpl C {\n    #[cfg(test)]\n    fn d() {\n        e\n    }\n    f\n}\n#[cfg(test)]\nmod g {\n    h\n}\ni\n";
    let source = Source { path: String::new(), text: text.into() };
    let shipped: Vec<&str> = source.shipped().map(|(_, line)| line).collect();
    assert_eq!(shipped, ["a", "b", "impl C {", "    f", "}", "i"]);
}

#[test]
fn nothing_is_left_to_do() {
    let words = ["TO+DO", "FIX+ME", "XX+X", "to+do!(", "unimple+mented!(", "db+g!("]
        .map(|word| word.replace('+', ""));
    report("unfinished work is an issue, not a comment", lines_with(&words, &[]));
}

/// What each hunk of a patch finds before it changes it: the file, and the lines.
fn hunks(patch: &str) -> Vec<(&str, String)> {
    let (mut file, mut found) = ("", Vec::<(&str, String)>::new());
    for line in patch.lines() {
        match line.strip_prefix("--- a/") {
            Some(path) => file = path,
            None if line.starts_with("@@") => found.push((file, "\n".into())),
            None if line.starts_with("+++ ") => {}
            None => {
                let hunk = found.last_mut().filter(|_| line.starts_with([' ', '-']));
                hunk.into_iter().for_each(|(_, text)| *text += &format!("{}\n", &line[1..]));
            }
        }
    }
    found
}

/// One that is applied where its surroundings are only alike is another plant: it may be one that nothing finds.
#[test]
fn plants_fit_in_one_place() {
    let plants = sources().into_iter().filter(|source| source.path.starts_with("tests/plants/"));
    let (mut findings, mut count) = (Vec::new(), 0);
    for Source { path, text } in plants {
        for (file, hunk) in hunks(&text) {
            let source = fs::read_to_string(root().join(file)).unwrap_or_default();
            let places = format!("\n{source}").matches(&hunk).count();
            count += 1;
            if places != 1 {
                findings.push(format!("{path}: {places} places in {file}"));
            }
        }
    }
    assert!(count > 100, "{count} hunks");
    report("plants are renewed for the code as it is", findings);
}

#[test]
fn no_machine_is_named() {
    let words = ["/wo+rk/", "/fa+rm/", "/ro+ot/", "/ho+me/", ".lib+rary", "gms-no+tes"]
        .map(|word| word.replace('+', ""));
    report("nothing names the machine it was written on", lines_with(&words, &[]));
}

#[test]
fn unsafe_blocks_say_why_they_are_sound() {
    let mut findings = Vec::new();
    for source in sources().iter().filter(|source| source.path.ends_with(".rs")) {
        let lines: Vec<&str> = source.text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let mut behind = code.split("unsafe ").skip(1);
            let opens = behind.any(|code| code.starts_with('{') || code.starts_with("impl"));
            let argued = lines[i.saturating_sub(8)..=i].iter().any(|near| near.contains("SAFETY:"));
            if opens && !argued {
                findings.push(format!("{}:{}: {}", source.path, i + 1, line.trim()));
            }
        }
    }
    report("an unsafe block has a SAFETY comment directly above", findings);
}

#[test]
fn shipped_code_does_not_unwrap() {
    let sources = sources();
    let mut findings = Vec::new();
    for (krate, most) in UNWRAPS_MAX {
        let found: Vec<String> = sources
            .iter()
            .filter(|source| source.is_rust_of(krate) && !source.path.ends_with("tests.rs"))
            .flat_map(|source| source.shipped().map(move |(number, line)| (source, number, line)))
            .filter(|(_, _, line)| !line.trim_start().starts_with("//"))
            .filter(|(_, _, line)| line.contains(".unwrap()"))
            .map(|(source, number, line)| format!("{}:{number}: {}", source.path, line.trim()))
            .collect();
        if found.len() > most {
            findings.extend(found);
        }
    }
    report("unwrap() is for tests", findings);
}

#[test]
fn documents_exist_and_their_links_hold() {
    let mut findings = Vec::new();
    for name in [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE-APACHE",
        "LICENSE-MIT",
        "deny.toml",
        "docs/design.md",
        "docs/fault.md",
        "docs/eviction.md",
        "docs/kernel.md",
        "docs/decisions.md",
        "docs/glossary.md",
        "docs/protocol.md",
        "docs/benchmarks.md",
        ".ci/run",
    ] {
        if !root().join(name).is_file() {
            findings.push(format!("{name} is missing"));
        }
    }
    for source in sources().iter().filter(|source| source.path.ends_with(".md")) {
        let dir = root().join(&source.path).parent().expect("folder of a document").to_path_buf();
        for link in source.text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            let path = if target.is_empty() { root().join(&source.path) } else { dir.join(target) };
            let exists = target.contains("://")
                || path.exists() && (anchor.is_empty() || anchors(&path).contains(anchor));
            if !exists {
                findings.push(format!("{} links to {link}, which does not exist", source.path));
            }
        }
    }
    report("documents", findings);
}

/// What `#` can name in a document: its headings, as web pages make anchors of them.
fn anchors(document: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(document).expect("a document");
    let outside = text.split("```").step_by(2);
    let headings = outside.flat_map(str::lines).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| -> String {
        let kept = |c: &char| c.is_alphanumeric() || "-_ ".contains(*c);
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        title.chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn crates_depend_in_one_direction() {
    let order = ["policy", "transport", "agent", "pager", "tests", "bench"];
    let mut findings = Vec::new();
    for (i, krate) in order.iter().enumerate() {
        let manifest = fs::read_to_string(root().join(krate).join("Cargo.toml")).expect("manifest");
        for above in &order[i + 1..] {
            if manifest.contains(&format!("gms-{above}")) {
                findings.push(format!("{krate} depends on {above}"));
            }
        }
    }
    let policy = fs::read_to_string(root().join("policy/src/lib.rs")).expect("policy");
    if !policy.contains("#![forbid(unsafe_code)]") {
        findings.push("policy does not forbid unsafe code".into());
    }
    report("policy <- transport <- agent <- pager <- tests <- bench", findings);
}

/// A module of a crate by the names from the crate's root.
type Module = Vec<String>;

/// Which module of its crate a source file is, or a part of.
fn module_of(path: &str) -> Module {
    let inside = path.split_once("/src/").map_or("", |(_, inside)| inside);
    let mut names: Module = inside.trim_end_matches(".rs").split('/').map(str::to_string).collect();
    names.pop_if(|last| ["lib", "main", "mod"].contains(&last.as_str()));
    names
}

/// The paths of a tree of `use`: of `a::{b, c::{d, e}}` a::b, a::c::d and a::c::e.
fn paths_of(tree: &str) -> Vec<String> {
    let Some((start, list)) = tree.split_once('{') else { return vec![tree.trim().to_string()] };
    let list = list.trim_end().strip_suffix('}').expect("a list ends");
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in list.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        match parts.last_mut() {
            Some(last) if c != ',' || depth > 0 => last.push(c),
            _ => parts.push(String::new()),
        }
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty()).flat_map(|part| paths_of(part));
    parts.map(|path| format!("{}{path}", start.trim())).collect()
}

/// All paths in a source that begin at its crate's root or at a module above.
fn inner_paths(source: &Source) -> Vec<String> {
    let code: Vec<&str> = source
        .shipped()
        .map(|(_, line)| line.split("//").next().unwrap_or_default().trim())
        .collect();
    let code = code.join(" ");
    let starts =
        ["crate::", "super::", "self::"].into_iter().flat_map(|start| code.match_indices(start));
    let free =
        |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || "_:$".contains(c));
    let mut paths = Vec::new();
    for (at, _) in starts.filter(|(at, _)| free(*at)) {
        let in_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let path = code[at..].split(|c| !in_path(c)).next().unwrap_or_default();
        let is_tree = code[at + path.len()..].starts_with('{') && path.ends_with("::");
        let end = if is_tree { code[at..].find(';').unwrap_or(path.len()) } else { path.len() };
        paths.extend(paths_of(&code[at..at + end]));
    }
    paths
}

/// The module, out of `known`, in which what `path` names in the module `here` is.
fn resolve(path: &str, here: &Module, known: &BTreeMap<Module, BTreeSet<Module>>) -> Module {
    let mut names = path.split("::").map(str::trim).peekable();
    let mut at = if names.next_if_eq(&"crate").is_some() { Module::new() } else { here.clone() };
    while let Some(step) = names.next_if(|name| ["super", "self"].contains(name)) {
        if step == "super" {
            at.pop();
        }
    }
    for name in names {
        at.push(name.to_string());
        if !known.contains_key(&at) {
            at.pop();
            break;
        }
    }
    at
}

/// Whom each module of a crate uses, without those above and below itself.
fn uses_of(sources: &[&Source]) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut uses: BTreeMap<Module, BTreeSet<Module>> =
        sources.iter().map(|source| (module_of(&source.path), BTreeSet::new())).collect();
    for source in sources {
        let here = module_of(&source.path);
        let used: Vec<Module> =
            inner_paths(source).iter().map(|path| resolve(path, &here, &uses)).collect();
        let beside =
            used.into_iter().filter(|used| !used.starts_with(&here) && !here.starts_with(used));
        uses.entry(here.clone()).or_default().extend(beside);
    }
    uses
}

/// The modules that use each other in a circle: those left when whoever uses nobody, or is used by nobody, has gone.
fn circle(mut uses: BTreeMap<Module, BTreeSet<Module>>) -> BTreeMap<Module, BTreeSet<Module>> {
    loop {
        let before = uses.len();
        let used: BTreeSet<Module> = uses.values().flatten().cloned().collect();
        uses.retain(|module, uses| !uses.is_empty() && used.contains(module));
        let left: BTreeSet<Module> = uses.keys().cloned().collect();
        uses.values_mut().for_each(|uses| uses.retain(|module| left.contains(module)));
        if uses.len() == before {
            return uses;
        }
    }
}

#[test]
fn modules_use_each_other_in_one_direction() {
    let sources = sources();
    let mut findings = Vec::new();
    for krate in ["policy", "transport", "agent", "pager", "tests", "bench"] {
        let is_shipped = |source: &&Source| {
            let is_test = source.path.ends_with("tests.rs") || source.path.contains("/tests/");
            source.is_rust_of(krate) && !is_test && !source.path.contains("/src/bin/")
        };
        let uses = uses_of(&sources.iter().filter(is_shipped).collect::<Vec<_>>());
        assert!(!uses.is_empty(), "{krate} has modules");
        for (module, used) in circle(uses) {
            let used: Vec<String> = used.iter().map(|used| used.join("::")).collect();
            findings.push(format!("{krate}: {} uses {}", module.join("::"), used.join(", ")));
        }
    }
    report("no circle of modules but of a parent with its own", findings);
}

#[test]
fn circles_of_modules_are_found() {
    let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
    let sources = [
        source("x/src/lib.rs", "mod a;\nmod b;\nmod c;\n"),
        source("x/src/a.rs", "use crate::{\n    b::{B, c as d},\n    c,\n};\n"),
        source("x/src/b/mod.rs", "fn f() -> super::c::C {}\n#[cfg(test)]\nuse crate::a;\n"),
        source("x/src/b/e.rs", "use super::super::a::A; // crate::c\n"),
        source("x/src/c.rs", "fn f() { crate::b::e::f() }\n"),
    ];
    let sources: Vec<&Source> = sources.iter().collect();
    let found = circle(uses_of(&sources));
    let names: Vec<String> = found.keys().map(|module| module.join("::")).collect();
    assert_eq!(names, ["a", "b", "b::e", "c"]);
    assert_eq!(found[&module_of("x/src/b/e.rs")], [module_of("x/src/a.rs")].into());
    let without_last = circle(uses_of(&sources[..4]));
    assert!(without_last.is_empty(), "{without_last:?}");
}

/// Whether an SPDX expression can be met with the licences above.
fn licence_is_met(expression: &str) -> bool {
    let plain = expression.replace(['(', ')'], " ").replace('/', " OR ");
    let met = |term: &str| LICENCES.contains(&term.trim());
    // `A OR B AND C`, without its brackets, read the strict way: every conjunct needs one accepted alternative.
    plain.split(" AND ").all(|conjunct| conjunct.split(" OR ").any(met))
}

#[test]
fn dependencies_are_licensed_and_from_the_registry() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // Offline: the build has fetched what this platform needs, and only that.
    let platform = "--filter-platform=x86_64-unknown-linux-gnu";
    let args = ["metadata", "--format-version=1", "--locked", "--offline", platform];
    let output =
        Command::new(cargo).args(args).current_dir(root()).output().expect("cargo metadata");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("JSON of cargo");
    let mut findings = Vec::new();
    let mut versions: BTreeMap<String, usize> = BTreeMap::new();
    for package in metadata["packages"].as_array().expect("packages") {
        let name = package["name"].as_str().unwrap_or_default();
        let licence = package["license"].as_str().unwrap_or_default();
        *versions.entry(name.to_string()).or_default() += 1;
        if !licence_is_met(licence) && !EXCEPTIONS.contains(&(name, licence)) {
            findings.push(format!("{name}: licence {licence:?}"));
        }
        let source = package["source"].as_str();
        if source.is_some_and(|source| !source.starts_with("registry+")) {
            findings.push(format!("{name}: comes from {source:?}"));
        }
    }
    assert!(versions.len() > 30, "cargo metadata lists the dependencies");
    report("dependencies", findings);
}

#[test]
fn licence_expressions_are_read() {
    for good in [
        "MIT",
        "Apache-2.0 OR MIT",
        "MIT/Apache-2.0",
        "GPL-3.0 OR MIT",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
    ] {
        assert!(licence_is_met(good), "{good}");
    }
    for bad in ["", "GPL-3.0", "MIT AND GPL-3.0"] {
        assert!(!licence_is_met(bad), "{bad}");
    }
}
