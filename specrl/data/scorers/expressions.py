"""Expressions and lists in responses: parsed, bounded and rewritten, so that no scorer sees a model's text.

Some of reasoning-gym's scorers evaluate the answer as Python. This module returns only numbers, operators, known names
and known functions, small enough to be computed.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

LONGEST = 2_000  # characters of an expression
LONGEST_LISTING = 100_000  # characters of a list or a matrix
DEEPEST = 60  # nested brackets
LARGEST_EXPONENT = 1_000
LARGEST_OUTER_EXPONENT = 24  # of a compound base, which a scorer may multiply out
MOST_CALLS = 40  # in one expression
DEEPEST_CALL = 4  # nested calls
LARGEST_SIZE = 4_096  # roughly the bits of a value, or the coefficients of an expanded polynomial
_FUNCTIONS = (
    "sqrt exp log ln Abs sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth asinh acosh atanh "
    "acoth erf"
)
FUNCTIONS = frozenset(_FUNCTIONS.split())  # SymPy's functions of one argument that may be called
CONSTANTS = frozenset(("pi", "E"))

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.UAdd, ast.USub)
_COMPUTE: dict[type[ast.operator], Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_PARSER_ERRORS = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)  # for text that is no expression


class NotAnAnswerError(ValueError):
    """The text is no answer of the expected form, or larger than any answer."""


def bounded_expression(text: str, names: Collection[str] = ()) -> str:
    """Rewrite an arithmetic expression of numbers and `names`, numbers as written, since scorers look for digits."""
    tree = _parsed(text, LONGEST).body
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if len(calls) > MOST_CALLS or max(map(_depth, calls), default=0) > DEEPEST_CALL:
        raise NotAnAnswerError("the expression has too many functions to be simplified")
    if _size(tree, frozenset(names)) > LARGEST_SIZE:
        raise NotAnAnswerError("the expression is too large to be computed")
    return ast.unparse(_AsWritten(text.strip()).visit(tree))


class _AsWritten(ast.NodeTransformer):
    """Replaces the value of each number by its text, such as `5.` or `1e3`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def visit_Constant(self, node: ast.Constant) -> ast.Name:
        return ast.Name(ast.get_source_segment(self._text, node) or "", ast.Load())


def bounded_listing(text: str) -> str:
    """Rewrite a list, or a list of lists, of numbers and texts."""
    tree = _parsed(text, LONGEST_LISTING)
    try:
        value = ast.literal_eval(tree)
    except _PARSER_ERRORS as error:
        raise NotAnAnswerError("the text is no list") from error
    if not isinstance(value, list | tuple):
        raise NotAnAnswerError("the text is no list")
    items = [item for row in value for item in (row if isinstance(row, list | tuple) else [row])]
    if not all(isinstance(item, int | float | str) for item in items):
        raise NotAnAnswerError("the text is no list of numbers or texts")
    return repr(value)


def _parsed(text: str, longest: int) -> ast.Expression:
    if len(text) > longest or nesting(text) > DEEPEST:
        raise NotAnAnswerError("the text is too long or nested too deeply")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about spellings that later Pythons refuse
            return ast.parse(text.strip(), mode="eval")
    except _PARSER_ERRORS as error:
        raise NotAnAnswerError("the text is no expression") from error


def nesting(text: str) -> int:
    """The maximum number of brackets of any kind that are open at once."""
    deepest = depth = 0
    for bracket in re.findall(r"[(\[{}\])]", text):
        depth = max(0, depth + (1 if bracket in "([{" else -1))
        deepest = max(deepest, depth)
    return deepest


def _size(node: ast.expr, names: frozenset[str]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and math.isfinite(number):
            return max(1, number.bit_length()) if isinstance(number, int) else 64
        case ast.Name(id=name) if name in names or (names and name in CONSTANTS):
            return 1
        case ast.UnaryOp(op=op, operand=operand) if isinstance(op, _OPERATORS):
            return 1 + _size(operand, names)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = _exponent(right, names)
            if exponent > LARGEST_OUTER_EXPONENT and not isinstance(left, ast.Name) and _has_names(left):
                raise NotAnAnswerError(f"an exponent of a sum is larger than {LARGEST_OUTER_EXPONENT}")
            return _size(left, names) * max(1.0, exponent)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            return _size(left, names) + _size(right, names)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if names and name in FUNCTIONS:
            return 1 + _size(argument, names)
    raise NotAnAnswerError("the text is no expression of numbers, operators and known names")


def _has_names(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) for part in ast.walk(node))


def _depth(call: ast.Call) -> int:
    inner = [node for argument in call.args for node in ast.walk(argument) if isinstance(node, ast.Call)]
    return 1 + max(map(_depth, inner), default=0)


def _exponent(node: ast.expr, names: frozenset[str]) -> float:
    size = _size(node, names)
    if _has_names(node):
        return size
    if size > LARGEST_SIZE:
        raise NotAnAnswerError("an exponent is too large to be computed")
    value = abs(_value(node))
    if value > LARGEST_EXPONENT:
        raise NotAnAnswerError(f"an exponent is larger than {LARGEST_EXPONENT}")
    return float(value)


def _value(node: ast.expr) -> Fraction:
    try:
        match node:
            case ast.Constant(value=int() | float() as number):
                return Fraction(number)
            case ast.UnaryOp(op=op, operand=operand):
                return -_value(operand) if isinstance(op, ast.USub) else _value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return Fraction(_COMPUTE[type(op)](_value(left), _value(right)))
    except (ArithmeticError, ValueError, TypeError) as error:  # such as a root of a negative number
        raise NotAnAnswerError("an exponent has no value") from error
    raise NotAnAnswerError("an exponent has no value")


def bounded_latex(text: str) -> str:
    """Return a LaTeX answer unchanged, unless it is too long, too deeply nested, or too costly to compute."""
    if len(text) > LONGEST or nesting(text) > DEEPEST:
        raise NotAnAnswerError("the answer is too long or nested too deeply")
    if re.search(r"\d[\d_]{500}", text):
        raise NotAnAnswerError("a number of the answer has more than 500 digits")
    plain = re.sub(r"\\(?:left|right|,|;|!|:| )|\$", "", text).replace("**", "^")
    plain = re.sub(r"\s*([\^!(){}\[\]])\s*", r"\1", plain)
    powers = [int(digits) for digits in re.findall(r"\^[({+\[-]*(\d+)", plain)]
    towers = re.findall(r"[\d.]+(?:[)}\]]*\^[({\[+-]*[\d.]+[)}\]]*)+", plain)
    if any(power > 10_000 for power in powers) or any(map(_is_tall, towers)):
        raise NotAnAnswerError("a power of the answer is too large to be computed")
    factorials = [int(digits) for digits in re.findall(r"(\d+)[)}\]]*!", plain)]
    of_a_power = r"!\W*!|[(\[{][^()\[\]{}]*[!^][^()\[\]{}]*[)\]}]!|\^\{?\d+\}?[)}\]]!"
    if any(number > 2_000 for number in factorials) or re.search(of_a_power, plain):
        raise NotAnAnswerError("a factorial of the answer is too large to be computed")
    if re.search(r"(?:factorial|gamma|binom)\W*\d*(?:\d{4}|\^)", plain, re.IGNORECASE):
        raise NotAnAnswerError("a function of the answer is too large to be computed")
    return text


def _is_tall(tower: str) -> bool:
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", tower)]
    size = 1.0
    for number in reversed(numbers[1:]):
        if size * math.log2(number + 2) > 64:
            return True
        size = max((number + 1) ** size, 1.0) if number else 1.0
    return bool(numbers) and size * math.log2(numbers[0] + 2) > LARGEST_EXPONENT * 100
