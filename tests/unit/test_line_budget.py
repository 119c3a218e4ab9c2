"""What `make check` says of packages that have grown beyond their budget."""

from __future__ import annotations

from tests.budgets import lines_of, problems


def test_a_package_above_its_budget_is_named_with_its_lines() -> None:
    lines = lines_of("specrl/lifetime")
    assert lines > 100
    assert problems({"specrl/lifetime": lines}, 100, {}) == []
    [found] = problems({"specrl/lifetime": lines - 1, "all": 10**6}, 100, {})
    assert found == f"specrl/lifetime: {lines} lines, and its budget in pyproject.toml is {lines - 1}"


def test_a_folder_with_too_many_modules_is_named() -> None:
    assert "specrl/lifetime: " in "\n".join(problems({}, 1, {}))
    assert "specrl/lifetime: " not in "\n".join(problems({}, 1, {"specrl/lifetime": 20}))
