//! Tests of reading launchers' variables.

use super::*;
use crate::ErrorKind;
use crate::bootstrap::UniqueId;
use std::collections::HashMap;

fn read(variables: &[(&str, &str)]) -> Result<JoinConfig> {
    let map: HashMap<_, _> = variables.iter().copied().collect();
    JoinConfig::from_variables(|name| map.get(name).map(|value| value.into()))
}

fn who(config: &JoinConfig) -> (usize, usize, usize) {
    (config.rank, config.world, config.local_rank)
}

#[test]
fn warplinks_own_variables_come_first() {
    let id = UniqueId::create([127, 0, 0, 1].into(), 4000).unwrap();
    let text = id.to_string();
    let config = read(&[
        ("WARPLINK_ID", &text),
        ("WARPLINK_RANK", "2"),
        ("WARPLINK_WORLD", "4"),
        ("WARPLINK_SECRET", "hush"),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "10.0.0.1"),
    ])
    .unwrap();
    assert_eq!(who(&config), (2, 4, 2));
    assert_eq!(config.rendezvous, Rendezvous::Id(id));
    assert_eq!(config.secret.as_deref(), Some("hush"));
}

#[test]
fn torchrun() {
    let torch = [
        ("RANK", "9"),
        ("WORLD_SIZE", "16"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];
    let config = read(&torch).unwrap();
    assert_eq!(who(&config), (9, 16, 1));
    assert_eq!(
        config.rendezvous.address(),
        "10.0.0.1:29501".parse().unwrap()
    );
    let config = read(&[&torch[..], &[("WARPLINK_PORT", "7000")]].concat()).unwrap();
    assert_eq!(config.rendezvous.address().port(), 7000);
    let config = read(
        &[
            &torch[..3],
            &[("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")],
        ]
        .concat(),
    );
    assert!(config.unwrap().rendezvous.address().ip().is_loopback());
    let last = [("MASTER_ADDR", "localhost"), ("MASTER_PORT", "65535")];
    let error = read(&[&torch[..3], &last].concat()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("no port follows MASTER_PORT=65535"),
        "{error}"
    );
    let given = [&torch[..3], &last, &[("WARPLINK_PORT", "7000")]].concat();
    assert_eq!(read(&given).unwrap().rendezvous.address().port(), 7000);
}

#[test]
fn open_mpi() {
    let mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ];
    let local = [
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "prterun-1@1"),
    ];
    let config = read(&[&mpi[..], &local].concat()).unwrap();
    assert_eq!(who(&config), (1, 2, 1));
    assert!(config.rendezvous.address().ip().is_loopback());
    let config = read(&[&mpi[..], &[("WARPLINK_ADDRESS", "10.0.0.7:99")]].concat()).unwrap();
    assert_eq!(config.rendezvous.address(), "10.0.0.7:99".parse().unwrap());
    let error = read(&mpi).unwrap_err().to_string();
    assert!(
        error.contains("WARPLINK_ADDRESS") && error.contains("MASTER_ADDR"),
        "{error}"
    );
}

#[test]
fn slurm() {
    let slurm = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_NODELIST", "10.0.0.[3-4,7]"),
        ("SLURM_JOB_ID", "4711"),
    ];
    let config = read(&slurm).unwrap();
    assert_eq!(who(&config), (5, 8, 1));
    let address = config.rendezvous.address();
    assert_eq!(address.ip().to_string(), "10.0.0.3");
    assert!((FIRST_PORT..32768).contains(&address.port()));
    let other = read(&[&slurm[..4], &[("SLURM_JOB_ID", "4712")]].concat()).unwrap();
    assert_ne!(other.rendezvous.address().port(), address.port());
    let step = read(&[&slurm[..], &[("SLURM_STEP_NODELIST", "10.0.0.4")]].concat()).unwrap();
    assert_eq!(step.rendezvous.address().ip().to_string(), "10.0.0.4");
}

#[test]
fn errors_name_the_missing_variables() {
    let error = read(&[]).unwrap_err().to_string();
    for name in [
        "WARPLINK_RANK",
        "WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "SLURM_PROCID",
    ] {
        assert!(error.contains(name), "{error}");
    }
    for (set, missing) in [("WARPLINK_RANK", "WARPLINK_WORLD"), ("WORLD_SIZE", "RANK")] {
        let error = read(&[(set, "1")]).unwrap_err().to_string();
        let says = format!("{set} is set, and {missing} is not; expected ");
        assert!(error.contains(&says), "{error}");
    }
    let me = [("WARPLINK_RANK", "0"), ("WARPLINK_WORLD", "1")];
    for (name, value) in [
        ("WARPLINK_ADDRESS", "10.0.0.1"),
        ("WARPLINK_ADDRESS", "10.0.0.1:0"),
        ("WARPLINK_ADDRESS", "10.0.0.1:70000"),
        ("WARPLINK_ID", "12ab"),
        ("SLURM_JOB_NODELIST", "node[1-"),
    ] {
        let error = read(&[&me[..], &[(name, value)]].concat()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parse, "{name}={value}");
        assert!(error.to_string().contains(name), "{error}");
    }
    let error = read(&[("RANK", "x"), ("WORLD_SIZE", "1")]).unwrap_err();
    assert!(error.to_string().contains("RANK=x"), "{error}");
    let error = read(&[("RANK", "3"), ("WORLD_SIZE", "3")]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = read(&[&me[..], &[("MASTER_ADDR", "10.0.0.1")]].concat()).unwrap_err();
    assert!(error.to_string().contains("MASTER_PORT"), "{error}");
}

#[test]
fn an_empty_variable_counts_as_not_set() {
    let config = read(&[
        ("WARPLINK_ID", ""),
        ("WARPLINK_ADDRESS", "127.0.0.1:5"),
        ("WARPLINK_RANK", ""),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
    ])
    .unwrap();
    assert_eq!((who(&config), config.secret), ((0, 1, 0), None));
}

#[test]
fn a_secret_that_is_blank_or_not_utf_8_is_refused() {
    use std::os::unix::ffi::OsStringExt;
    let base = [
        ("WARPLINK_RANK", "0"),
        ("WARPLINK_WORLD", "1"),
        ("WARPLINK_ADDRESS", "127.0.0.1:4000"),
    ];
    for blank in ["", " ", "\t\n"] {
        let error = read(&[&base[..], &[("WARPLINK_SECRET", blank)]].concat()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("WARPLINK_SECRET"), "{error}");
    }
    for name in ["WARPLINK_SECRET", "WARPLINK_RANK"] {
        let error = JoinConfig::from_variables(|wanted| {
            if wanted == name {
                return Some(OsString::from_vec(vec![b'a', 0xff]));
            }
            let found = base.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| value.into())
        })
        .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parse);
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn insecure_jobs_need_a_switch() {
    let base = [
        ("WARPLINK_RANK", "0"),
        ("WARPLINK_WORLD", "1"),
        ("WARPLINK_ADDRESS", "10.0.0.1:4000"),
    ];
    let with = |value| read(&[&base[..], &[("WARPLINK_ALLOW_INSECURE", value)]].concat());
    assert!(!read(&base).unwrap().allow_insecure);
    assert!(!with("0").unwrap().allow_insecure);
    assert!(with("1").unwrap().allow_insecure);
    assert!(with("yes").is_err());
}

/// Variables of a rank on this machine.
const LOCAL: [(&str, &str); 3] = [
    ("WARPLINK_RANK", "0"),
    ("WARPLINK_WORLD", "2"),
    ("WARPLINK_ADDRESS", "127.0.0.1:4000"),
];

#[test]
fn the_timeout_holds_for_joining() {
    let with = |value| read(&[&LOCAL[..], &[("WARPLINK_TIMEOUT", value)]].concat());
    assert_eq!(read(&LOCAL).unwrap().timeout, Duration::from_secs(60));
    assert_eq!(with("2").unwrap().timeout, Duration::from_secs(2));
    for text in ["soon", "0", "-1", "2.5"] {
        let error = with(text).unwrap_err();
        let expected = format!(
            "WARPLINK_TIMEOUT={text} is not a time limit; expected a whole number of seconds, at least 1"
        );
        assert_eq!(error.message(), expected);
    }
}

#[test]
fn the_heartbeat_limit_is_named_where_it_is_wrong() {
    let with = |value| read(&[&LOCAL[..], &[("WARPLINK_HEARTBEAT_LIMIT", value)]].concat());
    let limit = with("0.5").unwrap().heartbeat_limit;
    assert_eq!(limit, Duration::from_millis(500));
    for text in ["0", "soon", "-1", "NaN", "1e300"] {
        let error = with(text).unwrap_err();
        let expected = format!(
            "WARPLINK_HEARTBEAT_LIMIT={text} is not a heartbeat limit; expected a number of seconds, at least 0.1"
        );
        assert_eq!(error.message(), expected);
    }
}
