"""llamamg: a plugin-based runtime layer on llama.cpp's Python binding.

The names of `llamamg.api` are here; they are imported when the first one is used, so that a program starts at once.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamamg.api import *  # noqa: F403
    from llamamg.api import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module
        from importlib.util import find_spec

        # `from llamamg import x` asks for modules here, too, while others are being imported: llamamg.api would be a circle.
        if name != "__all__" and (name.startswith("__") or find_spec(f"llamamg.{name}")):
            raise AttributeError(name)
        api = import_module("llamamg.api")
        if name not in ("__all__", *api.__all__):
            raise AttributeError(f"module 'llamamg' has no attribute {name!r}")
        value = globals()[name] = getattr(api, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


__version__ = "0.1.0"
