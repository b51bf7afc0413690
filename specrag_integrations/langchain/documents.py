"""Documents: LangChain's, as our passages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from langchain_core.documents import Document

from specrag_integrations.errors import InputError
from specrag_integrations.passages import Passage


def checked_documents(context: object) -> list[Document]:
    """Return a question's documents.

    Raises:
        InputError: they are none.
    """
    if isinstance(context, str):
        raise InputError("drop `| format_docs`: context must be a list of Document")
    if isinstance(context, Document | Mapping) or not isinstance(context, Iterable):
        raise InputError(f"context must be a list of Document, not {type(context).__name__}")
    documents = list(context)
    for place, document in enumerate(documents):
        if not isinstance(document, Document):
            raise InputError(f"context[{place}] is a {type(document).__name__}, not a Document")
    return documents


def passage_of(document: Document) -> Passage:
    """Return a document as a passage; its metadata may hold anything."""
    title = document.metadata.get("title")
    return Passage(
        text=document.page_content,
        id=document.id,
        title=title if isinstance(title, str) else None,
        metadata={str(key): value for key, value in document.metadata.items()},
    )


class Retrieved:
    """A question's documents, and the passages that stand for them."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = tuple(documents)
        self.passages = tuple(passage_of(document) for document in documents)
        # Two documents may be equal, and a passage's metadata cannot be hashed.
        self._places = {id(passage): place for place, passage in enumerate(self.passages)}

    def document_of(self, passage: Passage) -> Document:
        """Return the document that a passage stands for."""
        return self.documents[self._places[id(passage)]]

    def used_first(self, used: Sequence[Passage]) -> list[Document]:
        """Return all documents: those an answer rests on in its order, then the others."""
        first = [self._places[id(passage)] for passage in used]
        rest = [place for place in range(len(self.documents)) if place not in first]
        return [self.documents[place] for place in (*first, *rest)]
