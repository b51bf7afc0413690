"""Prompt: the application's own, which writes drafts from some documents and answers from all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document

from specrag_integrations.errors import ConfigurationError, InputError
from specrag_integrations.langchain.asked import CONTEXT
from specrag_integrations.langchain.call import TRIAL, Call, current_call
from specrag_integrations.langchain.turns import from_langchain, without_tools
from specrag_integrations.models import Message, user
from specrag_integrations.passages import Passage
from specrag_integrations.prompts import draft_request

DOCUMENT_PROMPT: BasePromptTemplate[str] = PromptTemplate.from_template("{page_content}")
SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppPrompt:
    """An application's prompt as a template of drafts, and of the fallback.

    Args:
        prompt: With a place for `context`.
        document_prompt: How one document is written into it.
        separator: What stands between two documents.

    Raises:
        ConfigurationError: there is no place for `context`.
    """

    prompt: BasePromptTemplate[object]
    document_prompt: BasePromptTemplate[str]
    separator: str

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, BasePromptTemplate):
            raise ConfigurationError(
                f"prompt must be a prompt template of LangChain, not a {type(self.prompt).__name__}"
            )
        if CONTEXT not in self.prompt.input_variables:
            raise ConfigurationError(
                f"prompt has no {{context}}; its variables are {self.prompt.input_variables}"
            )

    def draft(
        self, question: str, passages: Sequence[Passage], history: Sequence[Message]
    ) -> tuple[Message, ...]:
        """Return the prompt with a subset of the documents, asking for rationale and answer."""
        return draft_request(self.answer(question, passages, history))

    def answer(
        self,
        question: str,
        passages: Sequence[Passage],
        history: Sequence[Message],  # noqa: ARG002 - the prompt has its own placeholder for it
    ) -> tuple[Message, ...]:
        """Return the prompt with some documents, as the application asks it.

        Raises:
            InputError: the question's input lacks a variable of the prompt, or there is none.
        """
        call = current_call()
        if call is None:
            raise InputError(
                "a chain with prompt= asks with its own input, which its engine does not have: "
                "use invoke, ainvoke, stream or astream of the chain"
            )
        if call is TRIAL:  # what makes prompts comparable is their words, not those put into them
            return (user(self._words),)
        variables = {
            "question": question,
            "input": question,
            **call.inputs,
            CONTEXT: self._context(passages, call),
        }
        if missing := sorted(set(self.prompt.input_variables) - variables.keys()):
            raise InputError(f"the input lacks {', '.join(missing)}, which the prompt asks for")
        return from_langchain(without_tools(self.prompt.format_prompt(**variables).to_messages()))

    def _context(self, passages: Sequence[Passage], call: Call) -> str:
        documents = map(call.retrieved.document_of, passages)
        return self.separator.join(format_document(d, self.document_prompt) for d in documents)

    @property
    def _words(self) -> str:
        words = [self.separator]
        for prompt in (self.prompt, self.document_prompt):
            shown = getattr(prompt, "pretty_repr", None)
            try:
                words.append(shown() if shown else ", ".join(prompt.input_variables))
            except NotImplementedError:  # prompts with examples cannot be shown
                words.append(", ".join(prompt.input_variables))
        return "\n".join(words)
