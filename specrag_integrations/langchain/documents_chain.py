"""The chain that stands where `create_stuff_documents_chain` stood."""

from __future__ import annotations

from typing import Any

from langchain_core.output_parsers import BaseOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable

from specrag_integrations.langchain.prompt import SEPARATOR
from specrag_integrations.langchain.runnable import SpeculativeRAGRunnable


def create_speculative_documents_chain(
    llm: Any,
    prompt: BasePromptTemplate[Any],
    *,
    drafter: Any,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_separator: str = SEPARATOR,
    **options: Any,
) -> Runnable[dict[str, Any], Any]:
    """Return a chain from a dict with `context`, a list of documents, to the answer's text.

    The prompt writes the drafts, each from a subset of the documents and with one more request for
    a rationale and an answer; with all documents, and as it is, it writes the fallback. `llm`
    verifies and falls back. The question that is verified is the input's `question` or `input`.

    Args:
        llm: The large model: an `Endpoint`, a chat model, or a Runnable that ends in one.
        prompt: With `context` among its variables; all others come from the input.
        drafter: The small model, or a list of several.
        output_parser: Reads the answer's text; by default the text is returned.
        document_prompt: How one document is written into the prompt: by default its text.
        document_separator: What stands between two documents.
        options: As for `SpeculativeRAGRunnable`.

    Raises:
        ConfigurationError: an argument, or a combination, that can never work.
    """
    chain = SpeculativeRAGRunnable(
        drafter=drafter,
        verifier=llm,
        prompt=prompt,
        document_prompt=document_prompt,
        document_separator=document_separator,
        **options,
    )
    answer: Runnable[Any, Any] = chain.pick("answer")
    if output_parser is not None:
        answer |= output_parser
    return answer.with_config(run_name="speculative_documents_chain")
