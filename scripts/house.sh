#!/usr/bin/env bash
# Counts what the sources' house rules are measured by: lines, documentation that paraphrases, comments, type names.
set -euo pipefail
cd "$(dirname "$0")/.."

python3 - <<'PYTHON'
import collections, pathlib, re

def sources(*folders):
    for folder in folders:
        yield from sorted(path for path in pathlib.Path(folder).rglob("*") if path.suffix in {".rs", ".py", ".cu", ".cuh", ".wlp"})

def code(path):
    """The lines of a file without items that only tests have."""
    if re.search(r"tests?\b|_loom", path.stem) or "tests" in path.parts:
        return []
    kept, end = [], None
    for line in path.read_text().splitlines():
        found = re.match(r"( *)#\[cfg\((?:all\()?(?:test|loom)\b", line)
        if found and end is None:
            # As rustfmt writes it, an item ends in its first line, or with a brace below its attribute.
            end, first = found.group(1) + "}", True
        elif end is None:
            kept.append(line)
        elif first and line.strip().startswith("#["):
            continue
        elif first and line.endswith((";", "}")) or line in (end, end + ";"):
            end = None
        else:
            first = False
    return kept

def lines(*folders):
    return sum(len(code(path)) for path in sources(*folders))

library = "crates/warplink/src"
for name, folders in {
    "library and kernels": (library, "crates/warplink/kernels"),
    "of these, program/": (f"{library}/program",),
    "command": ("crates/warplink-cli/src",),
    "C": ("crates/warplink-c/src",),
    "NCCL's interface": ("crates/warplink-nccl/src",),
    "Python": ("crates/warplink-py/src", "crates/warplink-py/python"),
}.items():
    print(f"lines without tests, {name}: {lines(*folders)}")
tests = sum(len(path.read_text().splitlines()) for path in sources(*pathlib.Path("crates").glob("*/tests")))
print(f"lines of integration tests: {tests}")

paraphrases = sum(
    bool(re.match(r'\s*(//[/!]|"""|#)\s*What ', line)) for path in sources("crates") for line in path.read_text().splitlines()
)
print(f"documentation lines that begin with 'What': {paraphrases}")

comments = written = 0
definitions = collections.Counter()
for path in sources(*pathlib.Path("crates").glob("*/src")):
    if path.suffix != ".rs":
        continue
    for line in code(path):
        text = line.strip()
        comments += bool(re.match(r"//(?![/!])", text)) or " // " in text
        written += bool(text) and not text.startswith("//")
        # The faces' types mirror the library's.
        found = re.match(r"(?:pub(?:\([^)]*\))? )?(?:struct|enum|trait|type|union) (\w+)", line)
        if found and path.parts[1] not in {"warplink-c", "warplink-py"}:
            definitions[found.group(1)] += 1
print(f"inline comments per 100 lines of code: {100 * comments / written:.2f}")
often = {name: count for name, count in definitions.most_common() if count > 2}
print(f"type names with more than two definitions: {len(often)} {often}")
print(f"lines of ARCHITECTURE.md: {len(pathlib.Path('ARCHITECTURE.md').read_text().splitlines())}")
PYTHON
