"""Functions of the user's own, named in a configuration by an import path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from specrl.config.base import ConfigError


def import_function(key: str, path: str) -> Any:
    """Import what `package.module:function` names, from the current folder or from `sys.path`.

    Args:
        key: the configuration key that holds the path, for the message.

    Raises:
        ConfigError: the path has another form, or nothing can be imported from there.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise ConfigError(f'{key} = "{path}": an import path has the form package.module:function')
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(
            0, str(Path.cwd())
        )  # a console script does not look there, and users keep their functions there
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f'{key} = "{path}" cannot be imported: {error}') from error
