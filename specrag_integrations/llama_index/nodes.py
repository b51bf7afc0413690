"""Nodes: what a retriever found, as the passages that the models read."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import MetadataMode, NodeWithScore

from specrag_integrations.passages import Passage
from specrag_integrations.subsets import Embedder


class Sources:
    """The nodes of one question, and the passages made of them.

    Args:
        nodes: As retrieved, the best first.
        additional: Nodes that are sources of the response, and not read.
    """

    def __init__(
        self, nodes: Sequence[NodeWithScore], additional: Sequence[NodeWithScore] | None = None
    ) -> None:
        self._nodes = list(nodes)
        self._additional = list(additional or ())
        self.passages = tuple(_passage(found) for found in self._nodes)
        self._places = {id(passage): place for place, passage in enumerate(self.passages)}

    def first(self, used: Sequence[Passage], *, only_used: bool) -> list[NodeWithScore]:
        """Return the sources of an answer: the nodes of the passages used first, in their order.

        The rest follow as they were retrieved, unless `only_used`; then the additional ones.
        """
        places = [self._places[id(passage)] for passage in used]
        if not only_used:
            places += [place for place in range(len(self._nodes)) if place not in places]
        return [*(self._nodes[place] for place in places), *self._additional]


def _passage(found: NodeWithScore) -> Passage:
    node = found.node
    # A node of an image alone has metadata, and no text that could answer anything.
    has_text = bool(node.get_content(metadata_mode=MetadataMode.NONE).strip())
    return Passage(
        text=node.get_content(metadata_mode=MetadataMode.LLM) if has_text else "",
        id=node.node_id,
        score=found.score,
        embedding=node.embedding,
    )


def embedder_from(given: Embedder | BaseEmbedding | None) -> Embedder | None:
    """Return a LlamaIndex embedding as the core calls one: all texts of a question in one batch.

    It is called synchronously, which the core does in a thread: the asynchronous methods of most
    local embeddings block the loop.
    """
    if not isinstance(given, BaseEmbedding):
        return given

    def embed(texts: Sequence[str], question: str) -> list[list[float]]:  # noqa: ARG001
        return given.get_text_embedding_batch(list(texts))

    return embed
