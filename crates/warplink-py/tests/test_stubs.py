"""The stubs say what the extension module has, and everything has a docstring."""

import ast
import inspect
import pathlib

import pytest

import warplink
from warplink import _warplink

STUBS = ast.parse((pathlib.Path(warplink.__file__).parent / "_warplink.pyi").read_text())
CLASSES = {node.name: node for node in STUBS.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUBS.body if isinstance(node, ast.FunctionDef)}


def parameters(function):
    """The names of the parameters in a stub, and which have a default."""
    given = function.args
    names = [one.arg for one in given.posonlyargs + given.args]
    defaults = len(names) - len(given.defaults)
    found = [(name, place >= defaults) for place, name in enumerate(names)]
    found += [(one.arg, value is not None) for one, value in zip(given.kwonlyargs, given.kw_defaults)]
    return [one for one in found if one[0] not in ("self", "cls")]


def parameters_at_runtime(function):
    found = inspect.signature(function).parameters.values()
    names = [(one.name, one.default is not one.empty) for one in found]
    return [one for one in names if one[0] not in ("self", "cls")]


def test_every_name_has_a_stub():
    public = {name for name in dir(_warplink) if not name.startswith("_")}
    assert public == set(CLASSES) | set(FUNCTIONS)
    assert public - {"version", "element_types"} <= set(warplink.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_members_of_classes(name):
    real = getattr(_warplink, name)
    members = {}
    for node in CLASSES[name].body:
        if isinstance(node, ast.FunctionDef):
            members[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            members[node.target.id] = node
    public = {member for member in dir(real) if not member.startswith("_")}
    assert public == {member for member in members if not member.startswith("_")}
    assert real.__doc__, name
    for member in public:
        assert getattr(real, member).__doc__, f"{name}.{member} has no docstring"
    for member, node in members.items():
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = {getattr(one, "id", "") for one in node.decorator_list}
        if "property" in decorators:
            assert not callable(inspect.getattr_static(real, member)), f"{name}.{member}"
        elif member == "__new__":
            assert parameters(node) == parameters_at_runtime(real), name
        elif not member.startswith("__"):
            assert parameters(node) == parameters_at_runtime(getattr(real, member)), f"{name}.{member}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    real = getattr(_warplink, name)
    assert real.__doc__ and parameters(FUNCTIONS[name]) == parameters_at_runtime(real)
