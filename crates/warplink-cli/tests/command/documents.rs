//! Commands in docs/*.md, as their readers would type them.

use crate::common::{command, stderr};
use std::fs;
use std::path::Path;

/// Saves the programs of a page in `folder`, each under its own name, as the pages tell their readers to.
fn save_programs(page: &str, folder: &Path) {
    for block in page.split("```wlp").skip(1) {
        let text = block.split("```").next().unwrap();
        let (_, text) = text.split_once('\n').unwrap();
        let head = text.lines().rfind(|line| line.starts_with("program "));
        let name = head.unwrap()["program ".len()..].split('(').next().unwrap();
        fs::write(folder.join(format!("{name}.wlp")), text).unwrap();
    }
}

#[test]
fn commands_of_the_documents_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = tempfile::tempdir().unwrap();
    let examples = root.join("examples/programs/").display().to_string();
    let mut count = 0;
    for page in fs::read_dir(root.join("docs")).unwrap() {
        let page = page.unwrap().path();
        if page.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let text = fs::read_to_string(&page).unwrap();
        save_programs(&text, folder.path());
        for line in text.lines() {
            if line.contains("warplink launch -n") {
                assert!(line.contains(" -- "), "{}: {line}", page.display());
            }
            let Some(words) = line.strip_prefix("warplink program ") else {
                continue;
            };
            // Those that need no ranks.
            if words.starts_with("run") {
                continue;
            }
            let line = format!("program {words}").replace("examples/programs/", &examples);
            let output = command(&line).current_dir(&folder).output().unwrap();
            let said = stderr(&output);
            assert!(
                output.status.success(),
                "{}: {line}: {said}",
                page.display()
            );
            count += 1;
        }
    }
    assert!(count >= 10, "{count}");
}
