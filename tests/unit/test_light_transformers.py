"""What transformers imports beside itself."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from specrl.models.light_transformers import skip_unused_parts
skip_unused_parts()
import transformers.generation.candidate_generator, transformers.modeling_utils
print(sorted({"sklearn", "scipy", "pandas"} & set(sys.modules)))
"""


def test_transformers_comes_without_the_libraries_that_nothing_here_needs() -> None:
    assert subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout == "[]\n"
