//! The texts of faulty programs, each in a file whose comments say what is wrong with it.

/// The names and texts of the programs in `folder`, which lies beside the tests, by name.
pub(crate) fn in_folder(folder: &str) -> Vec<(String, String)> {
    let folder = format!("{}/tests/{folder}", env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(folder).unwrap().map(|file| {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        (name, std::fs::read_to_string(&path).unwrap())
    });
    let mut texts: Vec<_> = files.collect();
    texts.sort();
    texts
}

/// The words after `# key:` in a program's comments.
pub(crate) fn header<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    let lead = format!("# {key}:");
    let line = text.lines().find_map(|line| line.strip_prefix(&lead));
    line.unwrap_or_else(|| panic!("no line '{lead}'"))
        .split_whitespace()
        .collect()
}
