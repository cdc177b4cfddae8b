//! Slurm's notation for lists of hosts, as in `node[01-04,7],login`.

use crate::error::{Error, Result};

/// The longest list that is parsed; lists of thousands of nodes are much shorter.
const MAX_LENGTH: usize = 1 << 20;

/// The first host of a list: of every bracket, the first number, with its leading zeros.
///
/// # Errors
/// [`ErrorKind::Parse`] when there is no host, a bracket is not closed, or its content is not a list of
/// numbers and ranges.
pub(crate) fn first_host(list: &str) -> Result<String> {
    if list.len() > MAX_LENGTH {
        return Err(bad("is too long; expected at most 1 MiB"));
    }
    let mut host = String::new();
    let mut rest = list.trim();
    while !rest.is_empty() && !rest.starts_with(',') {
        if let Some(inner) = rest.strip_prefix('[') {
            let (ranges, after) = inner
                .split_once(']')
                .ok_or_else(|| bad("has an unclosed bracket"))?;
            host.push_str(first_number(ranges)?);
            rest = after;
        } else {
            let end = rest.find(['[', ',']).unwrap_or(rest.len());
            let (name, after) = rest.split_at(end);
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
            if !name.chars().all(allowed) {
                return Err(bad(
                    "contains a character that is not allowed in host names",
                ));
            }
            host.push_str(name);
            rest = after;
        }
    }
    if host.is_empty() {
        return Err(bad("has no first host"));
    }
    Ok(host)
}

/// The first number of `01-04,7`, after checking all of them.
fn first_number(ranges: &str) -> Result<&str> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut first = None;
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        if !is_number(low) || !is_number(high) {
            return Err(bad("has a bracket that is not a list of numbers"));
        }
        first = first.or(Some(low));
    }
    first.ok_or_else(|| bad("has an empty bracket"))
}

fn bad(what: &'static str) -> Error {
    Error::parse(what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use proptest::prelude::*;

    #[test]
    fn finds_the_first_host() {
        for (list, first) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[01-04,7]", "node01"),
            ("node[7,01-04],login", "node7"),
            ("rack[2-3]n[09-10].cluster,x", "rack2n09.cluster"),
            ("a-b.c[100]", "a-b.c100"),
            (" n1 ", "n1"),
            ("[3-4]", "3"),
        ] {
            assert_eq!(first_host(list).unwrap(), first, "{list}");
        }
    }

    #[test]
    fn refuses_malformed_lists() {
        for list in [
            "", ",a", "a[", "a[1", "a[]", "a[1-]", "a[-1]", "a[1,]", "a[x]", "a[1]]", "a b", "a]",
        ] {
            assert_eq!(
                first_host(list).unwrap_err().kind(),
                ErrorKind::Parse,
                "{list}"
            );
        }
    }

    proptest! {
        #[test]
        fn never_panics(list in r"[a-z0-9\[\],\-]{0,20}", any: String) {
            let _ = first_host(&list);
            let _ = first_host(&any);
        }

        #[test]
        fn keeps_leading_zeros(name in "[a-z]{1,8}", low in "[0-9]{1,4}", high in "[0-9]{1,4}") {
            prop_assert_eq!(first_host(&format!("{name}[{low}-{high}],z")).unwrap(), format!("{name}{low}"));
        }
    }
}
