"""SciPy, which is an optional dependency."""

import importlib
import types


def import_scipy(name: str) -> types.ModuleType:
    """Imports `scipy.<name>` where it is used.

    The import takes half a second and 40 MB, which training need not pay.

    Raises:
      ImportError: if SciPy is not installed; says what to install.
    """
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError as error:
        raise ImportError(
            f"this solver needs `scipy.{name}`, and SciPy cannot be imported ({error}). Install it: "
            '`pip install "scipy>=1.15"`, or install this package with its extra `[plan]`.'
        ) from error
