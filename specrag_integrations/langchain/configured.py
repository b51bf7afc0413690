"""Configured: a chain whose options come with each call, in the other shapes that chains have."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import Runnable
from langchain_core.runnables.configurable import RunnableConfigurableFields
from langchain_core.tools import BaseTool

from specrag_integrations.langchain.graph import node_of, tool_of


# With its types given, it would take no Runnable that has others.
class ConfiguredRAG(RunnableConfigurableFields):  # type: ignore[type-arg]
    """What `SpeculativeRAGRunnable.configurable_fields` returns.

    LangChain would make node and tool of the chain behind it, which knows of no configuration.
    """

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where `load` finds it."""
        return cls.__module__.split(".")

    def as_node(self) -> Runnable[Any, dict[str, Any]]:
        """As `SpeculativeRAGRunnable.as_node`, configured by what the graph is."""
        return node_of(self)

    def as_rag_tool(self, name: str, description: str) -> BaseTool:
        """As `SpeculativeRAGRunnable.as_rag_tool`, configured by what the agent is."""
        return tool_of(self, name=name, description=description)
