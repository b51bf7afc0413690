"""LangChain: Speculative RAG as a Runnable like any other."""

from specrag_integrations.errors import MissingDependencyError

try:
    import langchain_core  # noqa: F401 - named in the error, instead of one of its modules
except ImportError as error:
    raise MissingDependencyError("langchain-core", "langchain") from error

from specrag_integrations.langchain.chat_model import EndpointChat
from specrag_integrations.langchain.documents_chain import create_speculative_documents_chain
from specrag_integrations.langchain.runnable import SpeculativeRAGRunnable
from specrag_integrations.langchain.runnable_chat import RunnableChat

__all__ = [
    "EndpointChat",
    "RunnableChat",
    "SpeculativeRAGRunnable",
    "create_speculative_documents_chain",
]
