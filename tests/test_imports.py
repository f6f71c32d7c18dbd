"""Who may import whom, read from the syntax trees; and importing shared_ops does no work."""

import ast
import configparser
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [name for name in ("shared_ops", "ms_train", "torch_proto", "weight_sync") if (ROOT / name).is_dir()]
FRAMEWORKS = {"torch", "mindspore", "transformers"}
COLLECTIVES = ("torch.distributed", "mindspore.communication")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imports(module: str, nodes: Iterator[ast.AST] | None = None) -> set[str]:
    """Dotted names that a module imports, anywhere in it or among `nodes`; of `from a import b` both a and a.b."""
    found = set()
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes or ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = package.split(".")
                source = ".".join([*parents[: len(parents) - node.level + 1], *([source] if source else [])])
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return found


def top_level(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: not the bodies of functions, nor what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import_time(child)


FORBIDDEN = {
    "shared_ops": FRAMEWORKS | {"ms_train", "torch_proto", "weight_sync"},
    "ms_train": {"torch", "transformers", "torch_proto", "weight_sync"},
    "torch_proto": {"mindspore", "transformers", "ms_train", "weight_sync"},
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_the_shared_part_and_the_twins_stand_apart(package):
    modules = [module for module in FILES if module.partition(".")[0] == package]
    assert len(modules) > 10
    wrong = {module: found for module in modules if (found := top_level(imports(module)) & FORBIDDEN[package])}
    assert not wrong


# what runs a framework's model to compare it
SIDES_OF_PARITY = tuple(f"weight_sync.agreement.side_{name}" for name in ("ms_train", "torch_proto", "transformers"))


def test_weight_sync_meets_a_framework_only_in_its_stores():
    for module in FILES:
        if module.startswith("weight_sync") and not module.startswith(("weight_sync.stores.", *SIDES_OF_PARITY)):
            assert not top_level(imports(module)) & FRAMEWORKS, module


def test_ranks_are_named_in_one_file_of_each_twin():
    for module in FILES:
        if module.startswith(("ms_train.", "torch_proto.")) and module.rpartition(".")[2] != "parallel":
            assert not [name for name in imports(module) if name.startswith(COLLECTIVES)], module


def test_no_module_imports_itself_in_a_circle():
    graph = {}
    for module in FILES:
        names = imports(module, at_import_time(TREES[module]))
        # importing a.b.c also runs a/__init__ and a.b/__init__
        names |= {name[: match.start()] for name in names for match in re.finditer(r"\.", name)}
        graph[module] = {name for name in names if name in FILES and not f"{module}.".startswith(f"{name}.")}
    assert sum(map(len, graph.values())) > 2 * len(PACKAGES)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("imports in a circle: " + " <- ".join(error.args[1]))


def test_what_is_imported_is_declared():
    """setup.cfg's base is enough for shared_ops and ms_train; torch_proto adds the extra `torch`, its export `onnx`."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")

    def names(text: str) -> set[str]:
        return {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower().replace("-", "_") for line in text.split("\n") if line}

    base = names(setup["options"]["install_requires"])
    extras = {key: names(value) for key, value in setup["options.extras_require"].items()}
    assert "torch" not in base and "mindspore" in base
    declared = {
        "shared_ops": base,
        "ms_train": base,
        "torch_proto": base | extras["torch"],
        "weight_sync": base.union(*extras.values()),
    }
    export = {"torch_proto.export", "torch_proto.onnx_ops"}
    assert "torch_proto.onnx_ops" not in imports("torch_proto.export", at_import_time(TREES["torch_proto.export"]))
    distribution = {"yaml": "pyyaml", "markupsafe": "jinja2"}  # markupsafe is part of jinja2's interface
    for module in FILES:
        used = top_level(imports(module)) - sys.stdlib_module_names - set(PACKAGES)
        used = {distribution.get(name, name).lower() for name in used}
        assert used <= declared[module.partition(".")[0]] | (extras["onnx"] if module in export else set()), module


def test_no_file_hides_another_module():
    """`python ms_train/main.py` puts ms_train/ first on the path; a folder of tests must not hide a package."""
    for package in ("ms_train", "torch_proto"):
        own = {path.stem for path in (ROOT / package).iterdir() if not path.stem.startswith("_")}
        foreign = {name for module in FILES for name in top_level(imports(module))} - set(PACKAGES)
        assert not own & (sys.stdlib_module_names | foreign)
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert not folders & {*PACKAGES, *FRAMEWORKS}


IMPORT_ALL = """
import importlib, pkgutil, sys, threading
done, watching = [], False
def watch(event, arguments):
    if watching and event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        done.append((event, arguments[0]))
    if watching and event in ("subprocess.Popen", "os.fork", "os.system", "socket.connect", "os.mkdir", "os.remove"):
        done.append((event, arguments))
sys.addaudithook(watch)
for watching in (False, True):  # the second time all that runs is this project's own
    for name in [name for name in sys.modules if name.partition(".")[0] == "shared_ops"]:
        del sys.modules[name]
    import shared_ops
    names = [module.name for module in pkgutil.walk_packages(shared_ops.__path__, "shared_ops.")]
    for name in names:
        importlib.import_module(name)
watching = False
assert len(names) > 20, names
assert not done, done
assert threading.active_count() == 1, threading.enumerate()
loaded = {"torch", "mindspore", "transformers", "tensorflow"} & set(sys.modules)
assert not loaded, loaded
"""


def test_importing_shared_ops_does_no_work(tmp_path):
    """No framework, no file written, no process or thread started, nothing printed."""
    command = [sys.executable, "-B", "-c", IMPORT_ALL]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())
