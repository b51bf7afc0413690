"""The code on docs/llama_index.md runs as it stands there."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import MockEmbedding, PromptTemplate, Settings, VectorStoreIndex
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index_kit import (
    Given,
    Json,
    Scripted,
    dialogue,
    llm_of_settings,
    nodes,
    speaker,
    text_of,
)

PAGE = Path(__file__).parents[1] / "docs" / "llama_index.md"


async def run(code: str, names: dict[str, Any]) -> None:
    """Run a block, which may await, as a notebook does."""
    compiled = compile(code, PAGE.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, names)  # noqa: S307 - our own page
    if inspect.iscoroutine(result):
        await result


# The memory of LlamaIndex's chat engines leaves a database's connection open.
@pytest.mark.filterwarnings("ignore:.*aiosqlite:ResourceWarning")
def test_the_code_of_the_page_runs(
    scripted: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in a running loop, with an index, a retriever, a template and an LLM of an app."""

    def respond(body: Json, call: int) -> Any:
        return dialogue(r2=0.9)(body, call) if "river" in text_of(body) else "the Clyde"

    server = scripted(respond)
    embedding = MockEmbedding(embed_dim=2)
    monkeypatch.setattr(Settings, "_embed_model", embedding)
    names: dict[str, Any] = {
        "index": VectorStoreIndex([one.node for one in nodes()], embed_model=embedding),
        "retriever": Given(nodes()),
        "question": "Which river is meant?",
        "template": PromptTemplate("{context_str} Q: {query_str}"),
        "my_llm": speaker(scripted, "Rationale: so it is.\nAnswer: river 1"),
        "SimilarityPostprocessor": SimilarityPostprocessor,
    }
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)

    async def page() -> None:
        for block in blocks:
            await run(re.sub(r"http://gpu:800\d/v1", server.base_url, block), names)

    with llm_of_settings(speaker(scripted, "a standard answer")):
        asyncio.run(page())
    names.clear()
    gc.collect()  # what is left open is told now, and not in another test

    assert len(blocks) == 8
    shown = capsys.readouterr().out
    assert len(re.findall(r"river \d \[1\]", shown)) >= 3
    assert re.search(r"river \d \[1\]\n\Z", shown)
    assert "the Clyde" in shown
