"""Fitting: the passages that a model's context has room for, the best-ranked first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrag_integrations.errors import ContextTooSmallError
from specrag_integrations.models import ChatModel, Message
from specrag_integrations.passages import Passage

_TEMPLATE_TOKENS = 256
"""What a chat template may add around the messages, at the most."""

Prompt = Callable[[Sequence[Passage]], Sequence[Message]]


async def fitting(
    model: ChatModel,
    prompt: Prompt,
    passages: Sequence[Passage],
    *,
    max_tokens: int,
    at_least: int = 0,
) -> tuple[Sequence[Passage], Sequence[Message]]:
    """Return the passages that fit into a prompt, by the server's tokeniser, and that prompt.

    A byte-level tokeniser never makes more tokens than there are bytes, so that most prompts need
    no count. Where the server cannot count, it is left to judge the prompt itself.

    Args:
        model: Who will read the prompt.
        prompt: The messages, of some of the passages.
        passages: In rank order.
        max_tokens: What is left free for the reply.
        at_least: Tokens that any context holds: a server whose prompt surely fits into so many is
            not asked how many it has, and need not be waited for.

    Raises:
        ContextTooSmallError: not even one passage fits.
    """
    whole = prompt(passages)
    if _bytes_of(whole) + _TEMPLATE_TOKENS + max_tokens <= at_least:
        return passages, whole
    capabilities = await model.capabilities()
    context = capabilities.context_tokens if capabilities else None
    if context is None:
        return passages, whole
    room = context - max_tokens

    async def fits(messages: Sequence[Message]) -> bool:
        if _bytes_of(messages) + _TEMPLATE_TOKENS <= room:
            return True
        tokens = await model.count_tokens(messages)
        return tokens is None or tokens <= room

    if await fits(whole):
        return passages, whole
    # One passage that is too long by itself must not keep out those behind it.
    possible = [passage for passage in passages if await fits(prompt([passage]))]
    if not possible:
        error = ContextTooSmallError(
            f"{model.name}: not one passage fits into the context of {context} tokens "
            f"beside an answer of {max_tokens}; use shorter passages or a larger context"
        )
        error.attempts = 0  # nothing was generated
        raise error
    low, high = 1, len(possible) + 1  # `low` of them fit, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await fits(prompt(possible[:middle])) else (low, middle)
    read = possible[:low]
    return read, prompt(read)


def _bytes_of(messages: Sequence[Message]) -> int:
    return sum(len(message.content.encode(errors="replace")) for message in messages)
