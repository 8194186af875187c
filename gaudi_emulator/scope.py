"""What the emulator does not stand in for, and the one error that says so."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from gaudi_emulator.releases import NAMES, listed


class OutOfScope(NotImplementedError):
    """A part of Gaudi's software that is not emulated; on a card it works."""

    def __init__(self, what: str, meanwhile: str) -> None:
        super().__init__(
            f"{what} is out of the emulator's scope; a card has it if its release does. Meanwhile: {meanwhile}"
        )


# What to use while checking, by module of `habana_frameworks.torch` and name; "" for every other name of the module
OUT_OF_SCOPE: dict[str, dict[str, str]] = NAMES["out_of_scope"]
# Further modules that programs import; of nearly all nothing is emulated
MODULES = listed("modules")
# Operators of the vendor, by a part of their names
OPERATORS: dict[str, str] = NAMES["out_of_scope_operators"]


class CustomOperators:
    """`torch.ops.hpu`: the vendor's own operators (fp8, int4, mixtures of experts, ...)."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = (hint for part, hint in OPERATORS.items() if part in name)
        return beyond(f"torch.ops.hpu.{name}", next(known, "plain torch operators while checking"))


class BeyondModule(ModuleType):
    """A module whose other names can be imported and not be used."""

    meanwhile: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return beyond(f"{short(self.__name__)}.{name}", self.meanwhile)


def short(module: str) -> str:
    return module.removeprefix("habana_frameworks.").removeprefix("torch.")


def names_of(module: str) -> dict[str, Any]:
    """What stands under the names of a module that are out of scope."""
    return {name: beyond(name, hint) for name, hint in OUT_OF_SCOPE.get(module, {}).items() if name}


def meanwhile_for(module: str) -> str:
    """What to use in the place of a module's other names, by the nearest one around it that says so."""
    while module:
        if hint := OUT_OF_SCOPE.get(module, {}).get(""):
            return hint
        module = module.rpartition(".")[0]
    return "leave it out while checking"


class Beyond(type):
    """Of classes, one for each name that programs may look for: only a call, of it or of what it has, is an error."""

    what: str
    meanwhile: str

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise OutOfScope(cls.what, cls.meanwhile)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return beyond(f"{cls.what}.{name}", cls.meanwhile)


def beyond(what: str, meanwhile: str) -> Any:
    """Stands under a name that programs may look for; only its use is an error."""
    return Beyond(what.rpartition(".")[2], (), {"what": what, "meanwhile": meanwhile})
