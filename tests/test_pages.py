"""The code on the README and on docs/scores.md runs as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from specrag_integrations import Endpoint

ROOT = Path(__file__).parents[1]
QUESTION = "Which city is the capital of Australia?"
PASSAGES = [f"Fact {n}: Canberra is the capital of Australia." for n in range(6)]
FRAMEWORKS = ("llama_index", "langchain")


def code_of(page: Path) -> list[str]:
    """Return a page's blocks of Python, in order."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert blocks
    return blocks


def run(code: str, names: dict[str, Any], server: ScriptedServer | None = None) -> None:
    """Run a block; the servers of the page are on loopback here."""
    if server is not None:
        code = re.sub(r"http://gpu:800\d/v1", server.base_url, code)
    exec(compile(code, "page", "exec"), names)  # noqa: S102 - our own page


@pytest.mark.parametrize("page", ["README.md", "docs/scores.md"])
def test_the_code_of_a_page_runs(
    page: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, with the names that the text speaks of: a question, passages, two models."""
    endpoint = Endpoint(server.base_url)
    names: dict[str, Any] = {
        "question": QUESTION,
        "passages": PASSAGES,
        "drafter": endpoint,
        "verifier": endpoint,
    }
    ran = 0
    for code in code_of(ROOT / page):
        if "EmbeddedPair" in code or any(name in code for name in FRAMEWORKS):
            continue  # run by a test with real models, and by those of the frameworks
        before = len(server.chats)
        run(code, names, server)
        asks = re.search(r"\.(ask|stream|score)\(", code)
        assert bool(asks) == (len(server.chats) > before), code
        ran += 1
    assert ran >= 2
    assert capsys.readouterr().out


def block_of_readme(framework: str) -> str:
    (code,) = [one for one in code_of(ROOT / "README.md") if framework in one]
    return code


def test_the_line_for_llama_index_runs(server: ScriptedServer) -> None:
    """The engine that an index makes is taken over, and its LLM verifies."""
    pytest.importorskip("llama_index.core")
    from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex
    from llama_index_kit import llm_of_settings

    from specrag_integrations.llama_index import EndpointLLM

    embedding = MockEmbedding(embed_dim=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Settings, "_embed_model", embedding)
        documents = [Document(text=text) for text in PASSAGES]
        index = VectorStoreIndex.from_documents(documents, embed_model=embedding)
        names: dict[str, Any] = {"index": index, "Endpoint": Endpoint}
        with llm_of_settings(EndpointLLM(Endpoint(server.base_url))):
            run(block_of_readme("llama_index"), names, server)
            response = names["engine"].query(QUESTION)
    assert str(response)
    assert len(response.source_nodes) == len(PASSAGES)
    assert server.chats


def test_the_chain_for_langchain_runs(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a retriever, from a question to an answer."""
    pytest.importorskip("langchain_core")
    from langchain_kit import Retriever

    names: dict[str, Any] = {"retriever": Retriever(), "Endpoint": Endpoint, "question": QUESTION}
    run(block_of_readme("langchain"), names, server)
    assert capsys.readouterr().out.strip()
    assert server.chats


@pytest.mark.embedded
def test_the_code_for_models_on_this_machine_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's embedded pair answers from the passages."""
    mirror = os.environ.get("SPECRAG_REGISTRY", str(ROOT / "weights-mirror.toml"))
    monkeypatch.setenv("SPECRAG_REGISTRY", mirror)
    (code,) = [code for code in code_of(ROOT / "README.md") if "EmbeddedPair" in code]
    run(code, {"question": QUESTION, "passages": PASSAGES})
    assert "Canberra" in capsys.readouterr().out
