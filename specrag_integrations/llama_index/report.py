"""Report: how an answer came about, as `response.metadata["specrag"]`."""

from __future__ import annotations

from typing import Any

from specrag_integrations.answers import Answer


class Report(dict[str, Any]):
    """An answer's `to_dict()` without its text, and with its passages by id; plain JSON.

    As text it is one short line: LlamaIndex makes a response that is retrieved (an engine behind an
    `IndexNode`) a node, whose metadata the next model reads.
    """

    def fill(self, answer: Answer) -> None:
        """Take in what is known at the end."""
        told = answer.to_dict()
        del told["text"]
        told["passages"] = [passage.id for passage in answer.passages]
        told["trace"]["passages"] = [passage.id for passage in answer.trace.passages]
        self.update(told)

    def __str__(self) -> str:
        reason = self.get("fallback_reason")
        return f"fell back to standard RAG ({reason})" if reason else "a draft was selected"
