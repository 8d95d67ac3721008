"""Redirection of the Python processes that a redirected script starts.

The interpreter imports this file at startup, because its folder is first in PYTHONPATH.
"""

import os
import sys


def _run_shadowed() -> None:
    """Run the sitecustomize that this file shadows."""
    from importlib.machinery import PathFinder

    ours = os.path.join("littrainer", "redirection", "startup")
    folders = [folder for folder in sys.path if not folder.endswith(ours)]
    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        import importlib.util

        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if sys.version_info >= (3, 10):  # noqa: UP036 - the interpreters that a script starts may be older than its own
    try:
        from littrainer.redirection.redirect import install

        install()
    except ImportError:
        # Interpreter of an environment without littrainer.
        pass
    except Exception as error:
        sys.stderr.write(f"littrainer: transformers' Trainer is not redirected in this process: {error!r}\n")

_run_shadowed()
