# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speculative RAG in a LlamaIndex app
#
# An app has an index and a query engine. One line makes the engine speculative: a small model drafts
# answers from subsets of the retrieved nodes, the app's own model verifies them.
#
# Both models run on this machine, through llama.cpp:
# `pip install 'specrag-integrations[llama-index,local]'`.

# %%
from llama_index.core import Document, PromptTemplate, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.node_parser import TokenTextSplitter
from sklearn.feature_extraction.text import HashingVectorizer

from specrag_integrations import EmbeddedPair
from specrag_integrations.corpus import documents_path
from specrag_integrations.llama_index import EndpointLLM, SpeculativeQueryEngine

pair = EmbeddedPair(num_drafts=3)  # servers start on first use and stop with the kernel

# %% [markdown]
# ## The app: documents, an embedding, an index
#
# Any LlamaIndex embedding will do. This one hashes words, so that nothing need be downloaded.

# %%
hashes = HashingVectorizer(n_features=512, stop_words="english")


class WordHashes(BaseEmbedding):
    def _get_text_embedding(self, text):
        return hashes.transform([text]).toarray()[0].tolist()

    def _get_query_embedding(self, query):
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


documents = [
    Document(text=path.read_text(encoding="utf-8"), metadata={"file_name": path.name})
    for path in sorted(documents_path().glob("*.md"))
]
index = VectorStoreIndex.from_documents(
    documents,
    transformations=[TokenTextSplitter(chunk_size=120, chunk_overlap=10)],
    embed_model=WordHashes(),
)
engine = index.as_query_engine(
    llm=EndpointLLM(pair.verifier, max_tokens=64), similarity_top_k=4, streaming=True
)

# %% [markdown]
# ## The change

# %%
engine = SpeculativeQueryEngine.from_engine(engine, drafter=pair.drafter, num_drafts=3)
question = "In which city was the lighthouse engineer Robert Stevenson born?"

# %%
response = engine.query(question)
response.print_response_stream()

# %% [markdown]
# ## What the answer rests on
#
# The winner's nodes come first: `[1]` in the answer is the first of them.

# %%
for number, source in enumerate(response.source_nodes, start=1):
    print(f"[{number}] {source.metadata['file_name']}: {source.text[:60]}…")

# %%
told = response.metadata["specrag"]
for draft in told["trace"]["drafts"]:
    score = next(
        (s["value"] for s in told["trace"]["scores"] if s["draft"] == draft["index"]), None
    )
    print(draft["index"], draft.get("answer", draft.get("failed")), score)
print(told["tier"], told["usage"]["requests"], "requests")

# %% [markdown]
# ## Awaited, in the kernel's own loop
#
# The second and third call of the kernel, and a third way to read a stream.

# %%
response = await engine.aquery("Who designed the Forth Bridge?")
async for piece in response.async_response_gen():
    print(piece, end="")

# %%
print(await engine.aquery("Which planet did Voyager 2 visit last?"))

# %% [markdown]
# ## The app's own prompt
#
# It is what the fallback sends, and the drafts are asked for by it.

# %%
engine.update_prompts(
    {
        "response_synthesizer:text_qa_template": PromptTemplate(
            "You answer visitors of a museum.\n\n{context_str}\n\nQuestion: {query_str}"
        )
    }
)
print(engine.get_prompts()["response_synthesizer:draft_template"].get_template())

# %%
pair.close()
