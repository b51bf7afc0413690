"""EndpointChat through LangChain's own suites for chat models, over a real embedded server.

It needs `langchain-tests`, whose pytest-asyncio wants an environment of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="needs the environment of `make test-floors`")

from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from specrag_integrations.langchain import EndpointChat
from specrag_integrations.local.server import LlamaServer
from specrag_integrations.local.weights import pull

REGISTRY = os.environ.get(
    "SPECRAG_REGISTRY", str(Path(__file__).parents[1] / "weights-mirror.toml")
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the smallest real model."""
    weights = pull("smollm2-135m-instruct", registry=REGISTRY)
    with LlamaServer(weights, slots=2, context_tokens=2048, alias="smol") as server:
        yield server.base_url


class TestUnit(ChatModelUnitTests):
    """Construction and standard parameters; no request is sent."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return EndpointChat

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": "http://localhost:1/v1", "model": "smol", "api_key": "test"}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False

    @pytest.mark.xfail(reason="`load` knows the classes of LangChain's partners alone", strict=True)
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


@pytest.mark.embedded
class TestIntegration(ChatModelIntegrationTests):
    """Requests to a real model, in every way that LangChain asks."""

    @pytest.fixture(autouse=True)
    def _served(self, address: str) -> None:
        self.address = address

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return EndpointChat

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": self.address, "model": "smol", "temperature": 0}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False
