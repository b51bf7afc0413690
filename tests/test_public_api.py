"""What the package exports, and what importing it costs."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import specrag_integrations

HEAVY = ["openai", "sklearn", "numpy", "tenacity", "llama_index", "langchain_core", "xllamacpp"]


def test_all_is_sorted_and_holds_nothing_twice():
    """So that a diff of it is a diff of the public surface."""
    names = specrag_integrations.__all__

    assert names == sorted(set(names))


def test_dir_shows_the_public_names():
    """What completion offers is what there is."""
    assert dir(specrag_integrations) == specrag_integrations.__all__


@pytest.mark.parametrize("name", specrag_integrations.__all__)
def test_every_public_name_can_be_imported_and_is_documented(name):
    """From the package, whatever module it lives in."""
    value = getattr(specrag_integrations, name)

    assert value.__name__ == name
    assert value.__module__.startswith("specrag_integrations.")
    assert value.__doc__
    assert getattr(specrag_integrations, name) is value


def test_a_name_that_is_not_there_is_an_attribute_error():
    """As with any module."""
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        specrag_integrations.Nothing  # noqa: B018 - looking is the point
    assert not hasattr(specrag_integrations, "__wrapped__")


def test_a_star_import_brings_the_public_names():
    """And nothing else."""
    names: dict[str, object] = {}
    exec("from specrag_integrations import *", names)  # noqa: S102 - no other way to test it

    assert sorted(set(names) - {"__builtins__"}) == specrag_integrations.__all__


@pytest.mark.parametrize(
    "code",
    [
        "import specrag_integrations",
        "from specrag_integrations import SpeculativeRAG, Endpoint, Passage",
        "from specrag_integrations import *",
    ],
)
def test_importing_loads_none_of_the_heavy_libraries(code):
    """They come with the first question, off the caller's loop."""
    show = f"{code}; import sys; print([n for n in {HEAVY!r} if n in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", show], capture_output=True, text=True, check=True
    )

    assert found.stdout.strip() == "[]"


def test_every_module_says_what_it_is():
    """In one sentence at its top."""
    for module in pkgutil.walk_packages(specrag_integrations.__path__, "specrag_integrations."):
        if not module.name.endswith("__main__"):
            assert importlib.import_module(module.name).__doc__, module.name
