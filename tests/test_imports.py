"""Importing the package is cheap: heavy libraries wait until they are needed."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_loads_no_heavy_library():
    """The three names every script begins with cost no client, no array, no framework."""
    script = (
        "import sys\n"
        "from specrag_integrations import SpeculativeRAG, Endpoint, Passage\n"
        "heavy = {'openai', 'httpx', 'httpx2', 'sklearn', 'scipy', 'numpy', 'bm25s', 'tenacity',\n"
        "         'pydantic', 'rich', 'click', 'llama_index', 'langchain_core', 'xllamacpp'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
