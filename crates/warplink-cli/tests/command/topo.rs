//! `warplink topo`: this machine, and recorded ones.

use crate::common::{assert_contains, object, run, run_with, stderr, stdout, succeeded, written};

fn mesh(name: &str) -> String {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../warplink/tests/meshes");
    format!("{directory}/{name}.json")
}

#[test]
fn ranks_on_the_host_device_are_connected_by_its_memory() {
    let text = succeeded(&run("topo --device host -n 3"));
    assert!(text.contains("mem  mem    -\n"), "{text}");
    let end = "class: fully-connected\ndirect path: possible\n";
    assert!(text.ends_with(end), "{text}");
}

#[test]
fn what_is_printed_as_json_can_be_shown_again() {
    let output = run("topo --device host -n 2 --json");
    let printed = object(&output);
    assert_eq!(printed["class"], "fully-connected");
    assert_eq!(printed["ranks"].as_array().unwrap().len(), 2);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("machine.json");
    std::fs::write(&path, &output.stdout).unwrap();
    let again = run(&format!("topo --json --mesh {}", path.display()));
    assert_eq!(stdout(&again), stdout(&output));
}

#[test]
fn a_recorded_mesh_is_explained_and_drawn() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mesh.svg");
    let svg = path.to_str().unwrap();
    let cube = mesh("hybrid-cube-mesh-permuted");
    let text = succeeded(&run(&format!("topo --mesh {cube} --svg {svg}")));
    assert_contains(
        &text,
        &[
            "groups: 0 2 5 7 and 6 4 1 3; facing ranks: 0-6 2-4 5-1 7-3",
            "L2    2 links from device to device",
            "0000:86:00.0     1  mlx5_2 (InfiniBand, same PCI switch)",
        ],
    );
    let drawing = std::fs::read_to_string(&path).unwrap();
    assert_contains(
        &drawing,
        &[
            "rank 7",
            "0000:8a:00.0",
            "NUMA node 1",
            "links between groups",
        ],
    );
}

#[test]
fn what_keeps_ranks_from_the_direct_path_is_said() {
    let output = run(&format!("topo --mesh {}", mesh("two-machines")));
    let text = stdout(&output);
    assert!(text.contains("direct path: not possible\n"), "{text}");
    assert_contains(&text, &["ranks 0, 1 on node-0, ranks 2, 3 on node-1"]);
}

#[test]
fn a_class_is_forced_by_the_environment() {
    let run = |class| run_with(&[("WARPLINK_TOPOLOGY", class)], "topo --device host -n 2");
    let text = stdout(&run("unknown"));
    assert!(text.contains("class: unknown, forced"), "{text}");
    let refused = run("torus");
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("WARPLINK_TOPOLOGY is 'torus'; expected"));
}

#[test]
fn a_file_that_is_no_mesh_is_refused() {
    let (_folder, path) = written("mesh.json", "{}");
    for path in [&path, "/nonexistent/mesh.json"] {
        let output = run(&format!("topo --mesh {path}"));
        assert_eq!(output.status.code(), Some(1));
        assert_contains(&stderr(&output), &[path]);
    }
}
