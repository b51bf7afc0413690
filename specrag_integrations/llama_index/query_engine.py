"""SpeculativeQueryEngine: a retriever and a speculative synthesizer, as one engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any, Self, TypeVar

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from specrag_integrations.errors import ConfigurationError
from specrag_integrations.llama_index.synthesizer import Model, SpeculativeSynthesizer

Part = TypeVar("Part", BaseRetriever, BaseNodePostprocessor)


class SpeculativeQueryEngine(RetrieverQueryEngine):
    """A `RetrieverQueryEngine` that answers by speculative RAG.

    Make one by `from_engine` or `from_args`.

    Args:
        retriever: Finds the nodes.
        response_synthesizer: Answers from them.
        node_postprocessors: Rerank, filter or change them in between.
        callback_manager: None: the synthesizer's.

    Raises:
        ConfigurationError: the synthesizer is another one.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        response_synthesizer: BaseSynthesizer | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not isinstance(response_synthesizer, SpeculativeSynthesizer):
            raise ConfigurationError(
                "response_synthesizer must be a SpeculativeSynthesizer, not a "
                f"{type(response_synthesizer).__name__}; write "
                "SpeculativeQueryEngine.from_args(retriever, drafter=…, verifier=…)"
            )
        if not isinstance(retriever, BaseRetriever):
            raise ConfigurationError(
                f"retriever must be a LlamaIndex retriever, not a {type(retriever).__name__}; "
                "write index.as_retriever()"
            )
        super().__init__(retriever, response_synthesizer, node_postprocessors, callback_manager)

    @classmethod
    def from_engine(
        cls,
        engine: BaseQueryEngine,
        *,
        drafter: Model | Sequence[Model],
        verifier: Model | None = None,
        **options: Any,
    ) -> Self:
        """Take over an engine's retriever, postprocessors, prompt, streaming and callbacks.

        An engine of this kind keeps its other options, too.

        Args:
            engine: The engine, which is left as it is.
            drafter: The small model, or several.
            verifier: The large model; None: the engine's LLM, or its verifier.
            **options: See `SpeculativeSynthesizer`; one that is given here outweighs the engine's.

        Raises:
            ConfigurationError: another kind of engine, or one that writes structured or multimodal
                answers.
        """
        if not isinstance(engine, RetrieverQueryEngine):
            raise ConfigurationError(
                f"from_engine takes a RetrieverQueryEngine, and this is a {type(engine).__name__}; "
                "give it a SpeculativeSynthesizer as its response_synthesizer, or the engines "
                "inside it to from_engine"
            )
        synthesizer = engine._response_synthesizer  # noqa: SLF001 - it has no other name
        if getattr(synthesizer, "_output_cls", None) is not None:
            options.setdefault("output_cls", synthesizer._output_cls)  # noqa: SLF001
        if getattr(synthesizer, "_multimodal", False):
            raise ConfigurationError(
                "from_engine: the engine shows images to its LLM (multimodal=True), and drafts are "
                "written from text"
            )
        taken = {
            **_settings_of(synthesizer),
            "callback_manager": engine.callback_manager,
            **options,
            "drafter": drafter,
        }
        if verifier is not None:
            taken["verifier"] = verifier
        return cls(
            engine.retriever,
            SpeculativeSynthesizer(**taken),
            engine._node_postprocessors,  # noqa: SLF001
            taken["callback_manager"],
        )

    @classmethod
    def from_args(  # type: ignore[override]
        cls,
        retriever: BaseRetriever,
        *,
        drafter: Model | Sequence[Model],
        verifier: Model | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> Self:
        """Make an engine of its parts.

        Args:
            retriever: Finds the nodes.
            drafter: The small model, or several.
            verifier: The large model; None: `Settings.llm`.
            node_postprocessors: Rerank, filter or change them in between.
            callback_manager: None: that of `Settings`.
            **options: See `SpeculativeSynthesizer`.
        """
        synthesizer = SpeculativeSynthesizer(
            drafter, verifier, callback_manager=callback_manager, **options
        )
        return cls(retriever, synthesizer, node_postprocessors, callback_manager)

    def with_retriever(self, retriever: BaseRetriever) -> Self:
        """Return the same engine with another retriever."""
        return type(self)(
            retriever,
            self._response_synthesizer,
            self._node_postprocessors,
            self.callback_manager,
        )

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """As `retrieve`, without blocking the loop, also with a retriever that is synchronous."""
        if _is_sync_only(self._retriever):
            nodes = await asyncio.to_thread(self._retriever.retrieve, query_bundle)
        else:
            nodes = await self._retriever.aretrieve(query_bundle)
        return await self._async_apply_node_postprocessors(nodes, query_bundle=query_bundle)

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the synthesizer; what finds and reranks nodes, and the callbacks, are shared."""
        copied = copy.copy(self)
        vars(copied).update(
            _response_synthesizer=copy.deepcopy(self._response_synthesizer, memo),
            _node_postprocessors=list(self._node_postprocessors),
        )
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return what can be pickled: all but the callbacks."""
        state = {name: value for name, value in vars(self).items() if name != "callback_manager"}
        state["_retriever"] = _with_callbacks(self._retriever, CallbackManager())
        state["_node_postprocessors"] = [
            _with_callbacks(one, CallbackManager()) for one in self._node_postprocessors
        ]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, callback_manager=Settings.callback_manager)
        parts: list[BaseRetriever | BaseNodePostprocessor] = [self._retriever]
        for part in [*parts, *self._node_postprocessors]:
            part.callback_manager = Settings.callback_manager


def _with_callbacks(part: Part, callbacks: CallbackManager) -> Part:
    copied = copy.copy(part)
    copied.callback_manager = callbacks
    return copied


def _settings_of(synthesizer: BaseSynthesizer) -> dict[str, Any]:
    """Return the settings of an engine's synthesizer, as ours takes them."""
    if isinstance(synthesizer, SpeculativeSynthesizer):
        return synthesizer._configuration()  # noqa: SLF001 - it has no other name
    return {
        "verifier": synthesizer._llm,  # noqa: SLF001
        "streaming": synthesizer._streaming,  # noqa: SLF001
        # An answer that asks several times has other prompts, none of which is that of one request.
        "text_qa_template": synthesizer.get_prompts().get("text_qa_template"),
    }


def _is_sync_only(retriever: BaseRetriever) -> bool:
    """Whether `aretrieve` would call the synchronous `_retrieve` on the loop."""
    return type(retriever)._aretrieve is BaseRetriever._aretrieve  # noqa: SLF001
