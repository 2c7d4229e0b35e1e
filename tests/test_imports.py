"""The floors: a file imports from its own floor or from below, never from above, and never in a circle."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "gym_rm"

FLOORS = {
    0: {"types", "errors", "spaces"},
    1: {
        "render",
        "control_tokens",
        "token_tree",
        "rows",
        "data",
        "planner",
        "config",
        "scorer",
        "metrics",
        "episodes",
        "infos",
        "checks",
        "transcripts",
    },
    2: {"attention", "models", "losses"},
    3: {"executors", "budget"},
    4: {"engine", "scorers"},
    5: {
        "env",
        "single_env",
        "wrappers",
        "trainer",
        "evaluation",
        "server",
        "adapters",
        "report",
        "testing",
        "score_file",
    },
    6: {"cli", "__init__", "__main__"},
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(path: Path) -> set[str]:
    """Top-level names inside gym_rm that a file imports when it runs (type-checking imports do not count)."""
    found = set()
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}"
            names = [node.module]
            if node.module == "gym_rm":
                names = [f"gym_rm.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] if "." in name else "__init__" for name in names if name.split(".")[0] == "gym_rm"}
    return found


def sources() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if "assets" not in path.parts]


def test_every_file_has_a_floor():
    assert {module_name(path) for path in sources()} <= set(FLOOR_OF)


def test_imports_point_down():
    upward = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sources()
        for name in imported_modules(path)
        if name in FLOOR_OF and FLOOR_OF[name] > FLOOR_OF[module_name(path)]
    ]
    assert not upward


def test_no_circles_between_modules():
    edges: dict[str, set[str]] = {}
    for path in sources():
        edges.setdefault(module_name(path), set()).update(imported_modules(path) - {module_name(path)})

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        for target in edges.get(name, ()):
            visit(target, (*trail, name))

    for name in edges:
        visit(name, ())


def test_nothing_is_called_utils():
    assert not [path for path in PACKAGE.rglob("*") if path.stem in {"utils", "common", "helpers", "util", "misc"}]


def test_import_loads_no_torch():
    code = "import sys, gym_rm; assert not {'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
