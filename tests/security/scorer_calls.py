"""What reasoning-gym's scorers call, read from their source; `specrl.data.scorers.review` rests on it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

PACKAGE = "reasoning_gym"
_DANGEROUS = (
    "eval exec compile parse_expr sympify S parse_latex lambdify literal_eval __import__ import_module run_path "
    "run_module system popen Popen check_output check_call run call spawn safe_load unsafe_load full_load "
    "safe_load_all load loads load_module getattr setattr globals locals vars open fork simplify"
)
DANGEROUS = frozenset(_DANGEROUS.split())  # they evaluate text, import, start programs, or reach by name
HARMLESS = frozenset(("re.compile", "json.loads", "json.load"))  # calls that only look dangerous
REVIEWED_CALLS = {
    "binary_matrix": {"eval"},
    "bitwise_arithmetic": {"eval"},  # of the problem's own text
    "countdown": {"parse_expr"},
    "intermediate_integration": {"parse_expr", "simplify"},
    "n_queens": {"eval"},
    "number_sorting": {"eval"},  # of the problem's own text
    "polynomial_multiplication": {"parse_expr"},
    "propositional_logic": {"simplify"},  # a method of its own
    "puzzle24": {"parse_expr"},
    "simple_integration": {"parse_expr", "simplify"},
    "spiral_matrix": {"eval"},
    "string_insertion": {"eval"},
}
"""Functions of `DANGEROUS` that only read what the guard of a generator returns, or the problem's own data."""


def dangerous_calls(dataset: type) -> frozenset[str]:
    """The functions of `DANGEROUS` that a data set's `score_answer`, or what it uses of the package, calls."""
    found: set[str] = set()
    seen: set[Any] = set()
    waiting: list[tuple[Any, type]] = [(inspect.getattr_static(dataset, "score_answer"), dataset)]
    while waiting:
        function, owner = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        names = {**inspect.unwrap(function).__globals__, "self": owner, "cls": owner}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                target = _resolved(node, names)
                own = list(_functions(target, owner))
                waiting += own
                if not own and _last(node) in DANGEROUS and ast.unparse(node) not in HARMLESS:
                    found.add(_last(node))
    return frozenset(found)


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _resolved(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolved(node.value, names)
        if isinstance(owner, ModuleType | type):
            return inspect.getattr_static(owner, node.attr, None)
    return None


def _functions(target: Any, owner: type) -> Iterator[tuple[Any, type]]:
    if isinstance(target, staticmethod | classmethod):
        target = target.__func__
    if isinstance(target, property):
        target = target.fget
    if not str(getattr(target, "__module__", "")).startswith(PACKAGE):
        return
    if inspect.isfunction(target):
        if PACKAGE in inspect.unwrap(target).__code__.co_filename:  # what `dataclass` makes has no source
            yield target, owner
    elif inspect.isclass(target) and target is not owner:
        for value in vars(target).values():
            for function, _ in _functions(value, target):
                yield function, target
