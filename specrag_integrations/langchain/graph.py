"""Graph: the Runnable as a node of LangGraph, and as a tool of an agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool, StructuredTool
from pydantic import BaseModel, Field

from specrag_integrations.errors import InputError
from specrag_integrations.langchain.asked import ANSWER, CONTEXT, HISTORY, SPECRAG, question_key

MESSAGES = "messages"


class ToolInput(BaseModel):
    """What an agent asks."""

    question: str = Field(description="The question, in full sentences and without pronouns.")


def tool_of(chain: Runnable[Any, Any], *, name: str, description: str) -> BaseTool:
    """Return a tool whose content is the answer, and whose artifact is the whole output."""

    def ask(question: str, config: RunnableConfig) -> tuple[str, dict[str, Any]]:
        output = chain.invoke(question, config)
        return output[ANSWER], dict(output)

    async def aask(question: str, config: RunnableConfig) -> tuple[str, dict[str, Any]]:
        output = await chain.ainvoke(question, config)
        return output[ANSWER], dict(output)

    return StructuredTool.from_function(
        ask,
        aask,
        name=name,
        description=description,
        args_schema=ToolInput,
        response_format="content_and_artifact",
    )


def node_of(chain: Any) -> Runnable[Any, dict[str, Any]]:
    """Return a node from a state to what the chain adds to it."""

    def node(state: Any, config: RunnableConfig) -> dict[str, Any]:
        values = _values(state)
        return _added(chain, values, chain.invoke(_asked(chain, values), config))

    async def anode(state: Any, config: RunnableConfig) -> dict[str, Any]:
        values = _values(state)
        return _added(chain, values, await chain.ainvoke(_asked(chain, values), config))

    return RunnableLambda(node, anode, name=chain.get_name())


def _values(state: Any) -> Mapping[str, Any]:
    """Return a state's values, whether it is a dict, a dataclass or a pydantic model."""
    if isinstance(state, Mapping):
        return state
    if dataclasses.is_dataclass(state):
        return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if isinstance(state, BaseModel):
        return dict(state)
    raise InputError(
        f"a state must be a dict, a dataclass or a model, not a {type(state).__name__}"
    )


def _asked(chain: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chain's input: a state's other values stay where they are."""
    # A prompt may have places for any of them.
    asked = {} if chain.prompt is None else dict(values)
    if chain.retriever is None:
        asked[CONTEXT] = values.get(CONTEXT)
    else:  # what the state has was found for an earlier question
        asked.pop(CONTEXT, None)
    key = question_key(values)
    if key is not None:
        history = values.get(HISTORY) or _before(values.get(MESSAGES) or (), values[key])
        return {**asked, key: values[key], HISTORY: history}
    messages = convert_to_messages(values.get(MESSAGES) or ())
    places = [place for place, message in enumerate(messages) if message.type == "human"]
    if not places:
        raise InputError("the state has no 'question', no 'input' and no message of a user")
    last = places[-1]
    return {**asked, "question": str(messages[last].text), HISTORY: messages[:last]}


def _before(messages: Sequence[Any], question: object) -> Sequence[Any]:
    """Return the turns before a question, which may be the last of them itself."""
    last = messages[-1] if messages else None
    asks = isinstance(last, HumanMessage) and str(last.text) == question
    return messages[:-1] if asks else messages


def _added(chain: Any, values: Mapping[str, Any], output: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the chain found out; what the state had already would be added to it twice."""
    added = {ANSWER: output[ANSWER], SPECRAG: output[SPECRAG]}
    if chain.retriever is not None:
        added[CONTEXT] = output[CONTEXT]
    if question_key(values) is None:
        # Under the id it was streamed with, it is known to be the same message.
        answer = AIMessage(output[ANSWER], id=output[SPECRAG].get("message_id"))
        added[MESSAGES] = [answer]
    return added
