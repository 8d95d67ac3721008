"""The invariants of the house, asserted over the sources: nothing is imported."""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
# From the bottom up: a package imports those before it alone, types and imports in functions counted.
PACKAGES = (
    *("redirection", "runtime", "model", "distributed", "arguments", "optim", "data", "callbacks", "strategies"),
    *("checkpoint", "evaluation", "tracking", "hub", "loop", "lightning_adapter", "search", "lightning"),
    *("check", "compat", "session", "hooks", "trainer", "seq2seq", "keras", "commands", "cli", "auto", "", "__main__"),
)
KNOW_THE_TRAINER = {"session", "hooks", "trainer", "seq2seq", "keras", "commands", ""}
# Library -> packages that may import it; others ask `sys.modules`, by runtime/lazy_isinstance.py.
MAY_IMPORT = {
    "lightning": {
        "distributed",
        "lightning_adapter",
        "strategies",
        "lightning",
        "tracking",
        "callbacks",
        "checkpoint",
        "commands",
    },
    "transformers": {"", "arguments", "data", "lightning", "loop", "callbacks", "hub"},
    "accelerate": {"arguments", "compat"},
}
KNOW_PROTECTED_NAMES_OF_LIGHTNING = {
    f"littrainer.lightning_adapter.{name}" for name in ("fast_training_loop", "lightning_internals")
}
# Module -> its state, which belongs to the process: process groups, workers, caches and handlers.
STATE_OF_THE_PROCESS = {
    "checkpoint.checksums": {"_manifest_cache"},
    "checkpoint.manager": {"_trainings"},
    "checkpoint.store": {"_locked_stores"},
    "checkpoint.verification": {"_edits_cache"},
    "compat.accelerator.facade": {"_log_once"},
    "data.loaders": {"_active_loaders"},
    "data.samplers": {"_lengths_cache"},
    "data.workers": {"_handled", "_workers"},
    "distributed.collectives": {"_host_group", "_barrier_count", "_open_blocks"},
    "distributed.failures": {"_store", "_peers", "_stacks"},
    "distributed.group": {"_reporting_group"},
    "loop.tracked_means": {"_current_means"},
    "redirection.redirect": {"_default_gc_threshold"},
    "runtime.log_filter": {"_filters_lock"},
    "runtime.log_levels": {"_console"},
    "runtime.tracebacks": {"_reports", "_handled"},
}
# These may shrink; what makes one of them larger has to take less of the Trainer, or be merged.
MAX_FUNCTIONS_WITH_A_TRAINER = 60
MAX_PRIVATE_TRAINER_NAMES = 10
MAX_UNTYPED_TRAINERS = 12
WRITTEN_FROM_OUTSIDE = {"control", "model_wrapped", "session", "state"}
MAX_FILES_BELOW_40_LINES = 23


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


TREES = {module_name(path): ast.parse(path.read_text("utf-8")) for path in sorted(SOURCES.rglob("*.py"))}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported(tree: ast.AST) -> set[str]:
    """The modules, of this package or others, that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in TREES else node.module for name in submodules}
    return found


def test_a_package_imports_only_those_below_it() -> None:
    upward = [
        f"{module} imports {other}"
        for module, tree in TREES.items()
        for other in imported(tree)
        if other.split(".")[0] == "littrainer"
        and package_of(module) not in ("", "cli")
        and PACKAGES.index(package_of(other)) > PACKAGES.index(package_of(module))
    ]
    assert not upward, f"Move what is imported down, or hand it over as a parameter: {upward}"


def test_each_package_has_its_place_in_the_order() -> None:
    found = {package_of(module) for module in TREES}
    assert found == set(PACKAGES), f"Put it in its place in PACKAGES, or merge it: {found ^ set(PACKAGES)}"


def test_files_import_each_other_in_no_circle() -> None:
    # An __init__ of a package is imported for its submodules.
    graph = {module: imported(tree) & TREES.keys() - {module} for module, tree in TREES.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_only_the_top_imports_the_trainer() -> None:
    found = [
        module
        for module, tree in TREES.items()
        if "littrainer.trainer" in imported(tree) and package_of(module) not in KNOW_THE_TRAINER
    ]
    assert not found, f"Take arguments, model or a part of the session instead: {found}"


def test_libraries_are_imported_where_they_are_known() -> None:
    found = [
        f"{module} imports {library}"
        for module, tree in TREES.items()
        for library, packages in MAY_IMPORT.items()
        if any(name.split(".")[0] == library for name in imported(tree)) and package_of(module) not in packages
    ]
    assert not found, f"Ask sys.modules by runtime/lazy_isinstance.py, or move it to a package that may: {found}"


def test_protected_names_of_lightning_are_imported_where_tests_compare_them() -> None:
    found = {
        f"{module}: {alias.name}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning.")
        for alias in node.names
        if alias.name.startswith("_") and alias.name[1] != "_" and module not in KNOW_PROTECTED_NAMES_OF_LIGHTNING
    }
    assert not found, f"Move it to lightning_internals.py, with a test in tests/lightning_adapter: {found}"


def state_of(tree: ast.Module) -> set[str]:
    """Return the names that functions rebind by `global`, and assigned names that are neither constants nor public."""
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    targets = (
        target
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return rebound | {name for name in names if name.islower() and name[0] == "_" != name[1]}


def test_modules_keep_no_state_of_a_training() -> None:
    found = {module.partition(".")[2]: state for module, tree in TREES.items() if (state := state_of(tree))}
    assert found == STATE_OF_THE_PROCESS, "Keep it in the session, or in the object that owns it."


def test_methods_have_typed_receivers() -> None:
    untyped = Counter(
        node.arg
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id == "Any"
    )
    assert untyped["self"] == 0 and untyped["trainer"] <= MAX_UNTYPED_TRAINERS


def modules_with(*attributes: str, is_assigned: bool = False) -> set[str]:
    """Return the modules in which one of some attributes is used, or assigned."""
    return {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in attributes
        and (isinstance(node.ctx, ast.Store) or not is_assigned)
    }


def test_no_message_depends_on_names_in_frames() -> None:
    found = modules_with("f_locals", "walk_tb", "co_code", "tb_lasti")
    assert not found, f"Keep what the message needs in a field, or in an attribute of the error: {found}"


def test_the_hook_of_uncaught_errors_is_set_in_one_place() -> None:
    assert modules_with("excepthook", is_assigned=True) == {"littrainer.runtime.tracebacks"}


def of_the_trainer(node: ast.Attribute) -> bool:
    value = node.value
    return (isinstance(value, ast.Name) and value.id in ("trainer", "owner")) or (
        isinstance(value, ast.Attribute) and value.attr in ("owner", "_trainer")
    )


def below_the_trainer() -> list[ast.Module]:
    return [
        tree for module, tree in TREES.items() if package_of(module) not in KNOW_THE_TRAINER - {"keras", "commands"}
    ]


def test_functions_take_what_they_read_and_not_the_trainer() -> None:
    handed = sum(
        # Lightning hands its own Trainer to hooks under that name.
        parameter.arg in ("trainer", "owner") and "pl.Trainer" not in ast.unparse(parameter.annotation or ast.Name(""))
        for tree in below_the_trainer()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    )
    assert handed <= MAX_FUNCTIONS_WITH_A_TRAINER, f"{handed} functions take the whole Trainer"


def test_private_names_of_the_trainer_are_its_own() -> None:
    names = Counter(
        node.attr
        for tree in below_the_trainer()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and of_the_trainer(node)
        if node.attr.startswith("_") and not node.attr.startswith("__")
    )
    assert names.total() <= MAX_PRIVATE_TRAINER_NAMES, f"Put it into the session: {names.most_common(5)}"


def test_only_few_attributes_of_the_trainer_are_written_from_outside() -> None:
    written = {
        node.attr
        for tree in below_the_trainer()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_the_trainer(node)
    }
    assert written <= WRITTEN_FROM_OUTSIDE, f"Write it in a part of the session: {written - WRITTEN_FROM_OUTSIDE}"


def lines_of_code(module: str, tree: ast.Module) -> int:
    """Lines without blanks, comments, docstrings and imports."""
    path = SOURCES.joinpath(*module.split(".")).with_suffix(".py")
    left_out = sum(not line.strip() or line.strip().startswith("#") for line in path.read_text("utf-8").splitlines())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out += (node.end_lineno or 0) - node.lineno + 1
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            left_out += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return len(path.read_text("utf-8").splitlines()) - left_out


def test_a_file_is_a_topic() -> None:
    small = [
        module
        for module, tree in TREES.items()
        if SOURCES.joinpath(*module.split(".")).with_suffix(".py").is_file() and lines_of_code(module, tree) < 40
    ]
    assert len(small) <= MAX_FILES_BELOW_40_LINES, f"Merge the smallest into the file of their topic: {small}"
