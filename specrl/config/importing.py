"""The user's own functions and classes, named in a configuration by an import path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from specrl.config.base import ConfigError


def import_function(key: str, path: str) -> Any:
    """Return what an import path `package.module:function` names, imported from the current folder or `sys.path`.

    Args:
        key: The configuration key that holds the path, for the message.

    Raises:
        ConfigError: The path does not have this form, or nothing can be imported from there.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise ConfigError(f'{key} = "{path}": an import path has the form package.module:function')
    if str(Path.cwd()) not in sys.path:
        # Users keep their functions in the current folder, where a console script does not look by itself. It comes
        # last, as in a job: a file there must not take the place of a package.
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # the module is a user's, and may fail in any way while it is imported
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f'{key} = "{path}" cannot be imported: {reason}') from error
