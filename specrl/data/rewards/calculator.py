"""The environment `calculator`: it completes the policy's `12 + 30 =`, until the policy states its answer.

The policy's text is parsed and computed number by number, never evaluated by Python.
"""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

from specrl.data.problems import Problem

CALL = re.compile(r"\s*=([-+*/(). \d]+)")  # the end of an asking turn, matched backwards: linear in its length
BEFORE = re.compile(r"\A(?:.*\.\s+(?=[\d(])|\s*\.+\s+)?(?:\s*\d+\)\s+(?=[\d(]))?")  # a sentence, or `1)` of a list
LONGEST = 100  # characters of an expression
ANSWER = re.compile(r"Answer: (-?\d[\d.,/]*)")
ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")  # before a number, where Python refuses them
NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,6})?")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
REFUSALS = (SyntaxError, ValueError, ZeroDivisionError)  # raised for what is no arithmetic on numbers, or has no value


class Calculator:
    """Answers `EXPRESSION =` with its value, and rewards the right `Answer: N` with 1.

    A turn that neither asks nor answers ends the conversation.
    """

    def reset(self, problem: Problem) -> list[dict[str, str]]:
        self._answer = problem.answer
        return []

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        if stated := ANSWER.findall(text):
            return [], float(stated[-1].rstrip(".,/").lstrip("0") == self._answer.lstrip("0")), True
        if (call := CALL.match(text[::-1])) is None:
            return [], 0.0, True
        expression = BEFORE.sub("", call[1][::-1])
        try:
            result = written(value(expression))
        except REFUSALS:
            result = "?"
        return [{"role": "tool", "content": f" {result}"}], 0.0, False


def written(number: Fraction) -> str:
    """Format a number: integers exactly, others with six digits."""
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.6g}"


def value(expression: str) -> Fraction:
    """Evaluate an expression of numbers, + - * / and brackets; raise one of `REFUSALS` if it has no value."""
    text = ZEROS.sub("", expression.strip())
    if len(text) > LONGEST:
        raise ValueError("too long")
    return _computed(text, ast.parse(text, mode="eval").body)


def _computed(text: str, node: ast.expr) -> Fraction:
    match node:
        case ast.Constant() if NUMBER.fullmatch(number := ast.get_source_segment(text, node) or ""):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(text, operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return Fraction(OPERATIONS[type(op)](_computed(text, left), _computed(text, right)))
    raise ValueError(text)
