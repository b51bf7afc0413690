"""Prompts: LlamaIndex's templates as those of the core, and the core's draft prompt as one.

Templates have the variables that LlamaIndex gives them, `context_str` and `query_str`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

from specrag_integrations.errors import ConfigurationError
from specrag_integrations.llama_index.messages import chat_messages, messages_from
from specrag_integrations.models import Message
from specrag_integrations.passages import Passage
from specrag_integrations.prompts import Template, draft_messages, draft_request, numbered

_CONTEXT, _QUERY = "{context_str}", "{query_str}"


def default_draft_template() -> ChatPromptTemplate:
    """Return the core's draft prompt as a template: filled in, it is the same to the letter."""
    turns = draft_messages(_QUERY, [Passage(text=_CONTEXT)])
    return ChatPromptTemplate(
        message_templates=[
            ChatMessage(role=turn.role, content=turn.content.replace(f"[1] {_CONTEXT}", _CONTEXT))
            for turn in turns
        ]
    )


class DraftTemplate(BasePromptTemplate):
    """An app's own prompt, which is made to ask for a draft: a rationale, then an answer."""

    base: BasePromptTemplate

    def __init__(self, base: BasePromptTemplate) -> None:
        inherited: dict[str, Any] = {
            "metadata": base.metadata,
            "template_vars": base.template_vars,
            "kwargs": base.kwargs,
        }
        super().__init__(base=base, output_parser=None, **inherited)  # type: ignore[call-arg]

    def partial_format(self, **kwargs: Any) -> DraftTemplate:
        """Return the template with some variables filled in."""
        return DraftTemplate(self.base.partial_format(**kwargs))

    def format(self, llm: BaseLLM | None = None, **kwargs: Any) -> str:
        """Return the prompt as one text."""
        return "\n\n".join(str(turn.content) for turn in self.format_messages(llm, **kwargs))

    def format_messages(self, llm: BaseLLM | None = None, **kwargs: Any) -> list[ChatMessage]:
        """Return the prompt's turns."""
        turns = messages_from(self.base.format_messages(llm=llm, **kwargs))
        return chat_messages(draft_request(turns))

    def get_template(self, llm: BaseLLM | None = None) -> str:
        """Return the app's prompt and what is added to it."""
        added = draft_request(())[0].content
        return f"{self.base.get_template(llm=llm)}\n\n{added}"


def is_llama_index_default(template: BasePromptTemplate) -> bool:
    """Whether it is the prompt that LlamaIndex uses where an app gives none."""
    return bool(template == DEFAULT_TEXT_QA_PROMPT_SEL)


def checked_template(name: str, template: object, *, llm: BaseLLM) -> None:
    """Accept a template that shows its context and can be sent.

    Raises:
        ConfigurationError: it is none, holds more than text, or leaves the context out.
    """
    if not isinstance(template, BasePromptTemplate):
        raise ConfigurationError(
            f"{name} must be a LlamaIndex prompt template, not a {type(template).__name__}; "
            "write PromptTemplate('… {context_str} … {query_str} …')"
        )
    filled = [
        messages_from(template.format_messages(llm=llm, context_str=context, query_str="question"))
        for context in ("first context", "second context")
    ]
    if filled[0] == filled[1]:
        raise ConfigurationError(f"{name} does not show the passages; it lacks {_CONTEXT}")


def draft_template(text_qa: BasePromptTemplate) -> BasePromptTemplate:
    """Return how drafts are asked for: by an app's prompt, or the core's where it is no app's."""
    return default_draft_template() if is_llama_index_default(text_qa) else DraftTemplate(text_qa)


def core_template(template: BasePromptTemplate, *, llm: BaseLLM, numbers: bool = False) -> Template:
    """Return a template as the core calls it; `numbers` shows passages as `[1] text`."""

    def filled(
        question: str, passages: Sequence[Passage], history: Sequence[Message] = ()
    ) -> tuple[Message, ...]:
        context = numbered(passages) if numbers else _joined(passages)
        turns = template.format_messages(llm=llm, context_str=context, query_str=question)
        return (*history, *messages_from(turns))

    return filled


def _joined(passages: Sequence[Passage]) -> str:
    """Join texts as LlamaIndex's compact mode does."""
    return "\n\n".join(passage.text.strip() for passage in passages)
