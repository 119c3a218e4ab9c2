"""The environment `calculator`: a policy that writes `12 + 30 =` is told the result, until it states its answer.

What the policy writes is parsed here, number by number, and never evaluated by Python.
"""

from __future__ import annotations

import re
from fractions import Fraction

from specrl.data.problems import Problem

CALL = re.compile(r"\s*=([-+*/(). \d]+)")  # the end of a turn that asks, read backwards: linear in the turn's length
BEFORE = re.compile(r"\A(?:.*\.\s+(?=[\d(])|\s*\.+\s+)?(?:\s*\d+\)\s+(?=[\d(]))?")  # a sentence, or `1)` of a list
LONGEST = 100  # characters of an expression
ANSWER = re.compile(r"Answer: (-?\d[\d.,/]*)")
TOKEN = re.compile(r"\s*(\d{1,15}(?:\.\d{1,6})?|[-+*/()])")
DEEPEST = 20  # brackets and signs within each other


class NotArithmeticError(ValueError):
    """An expression that is no arithmetic of numbers, or has no value."""


class Calculator:
    """Answers `EXPRESSION =` with its value, and rewards a turn that states the right `Answer: N` with 1.

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
            result = written(value(expression)) if len(expression) <= LONGEST else "?"
        except NotArithmeticError:
            result = "?"
        return [{"role": "tool", "content": f" {result}"}], 0.0, False


def written(number: Fraction) -> str:
    """A number as the calculator shows it: exact where it is whole, else with six digits."""
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.6g}"


def value(expression: str) -> Fraction:
    """The value of an expression of numbers, + - * / and brackets; raise NotArithmeticError if it has none."""
    tokens, place = [], 0
    while place < len(expression.rstrip()):
        if (found := TOKEN.match(expression, place)) is None:
            raise NotArithmeticError(expression)
        tokens.append(found[1])
        place = found.end()
    parser = _Parser(tokens)
    result = parser.sum(0)
    if parser.tokens:
        raise NotArithmeticError(expression)
    return result


class _Parser:
    """Takes the tokens of sums, products and factors from the front of a list, by recursive descent."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def sum(self, depth: int) -> Fraction:
        total = self._product(depth)
        while (operator := self._take("+-")) is not None:
            term = self._product(depth)
            total += term if operator == "+" else -term
        return total

    def _product(self, depth: int) -> Fraction:
        total = self._factor(depth)
        while (operator := self._take("*/")) is not None:
            factor = self._factor(depth)
            if operator == "/" and not factor:
                raise NotArithmeticError("division by zero")
            total = total * factor if operator == "*" else total / factor
        return total

    def _factor(self, depth: int) -> Fraction:
        if depth > DEEPEST or not self.tokens:
            raise NotArithmeticError("too deep, or cut off")
        if self._take("-") is not None:
            return -self._factor(depth + 1)
        if self._take("(") is not None:
            total = self.sum(depth + 1)
            if self._take(")") is None:
                raise NotArithmeticError("a bracket without an end")
            return total
        token = self.tokens.pop(0)
        if not token[0].isdigit():
            raise NotArithmeticError(token)
        return Fraction(token)

    def _take(self, operators: str) -> str | None:
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in operators else None
