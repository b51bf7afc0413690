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
# # Speculative RAG in five minutes
#
# A small model drafts several answers in parallel, each from a different subset of the retrieved
# passages. A large model reads each draft, without the passages, and its token log-probabilities
# are the score. The best draft is the answer; if none can be used, ordinary RAG takes over.
#
# Both models run on this machine, through llama.cpp: `pip install 'specrag-integrations[local]'`.
# They are small ones (0.5B and 1.5B parameters), good enough to watch the method at work.

# %%
import matplotlib.pyplot as plt

from specrag_integrations import EmbeddedPair, Endpoint, SpeculativeRAG, StandardRAG
from specrag_integrations.corpus import questions

pair = EmbeddedPair()  # servers start on first use and stop with the kernel
rag = SpeculativeRAG(**pair.roles)
rag.warmup()

# %% [markdown]
# ## A question and its passages
#
# Your retriever brings the passages; here they come from a small bundled corpus. Plain strings, best
# first, are enough.

# %%
row = questions()[0]
print(row.question)
for rank, passage in enumerate(row.passages):
    print(f"{rank}: {passage.title}: {passage.text[:70]}…")

# %% [markdown]
# ## The answer, and what it rests on

# %%
answer = rag.ask(row.question, row.passages)
print(answer.text)
for number, passage in enumerate(answer.passages, start=1):
    print(f"[{number}] {passage.title}")

# %% [markdown]
# ## The drafts and their scores, as a picture
#
# Each bar is one draft: the probability the verifier gave to "Yes, this is the correct answer",
# reading the draft and not the passages. It ranks drafts of one question. It is not a probability of being right, and no threshold
# on it means the same for two models, which is why `answer.confidence` stays None without a
# calibration.


# %%
def show(answer):
    """Draw one bar for each draft of an answer."""
    from math import exp

    values = {score.draft: score.value for score in answer.trace.scores}
    winner = answer.selection.winner
    labels, lengths, colours = [], [], []
    for draft in reversed(answer.trace.drafts):
        said = getattr(draft, "answer", None) or f"failed: {draft.reason}"
        ranks = ", ".join(map(str, draft.subset.ranks))
        labels.append(f"{said[:48]}\nfrom passages {ranks}")
        lengths.append(exp(values.get(draft.index) or float("-inf")))
        colours.append("tab:green" if draft.index == winner else "tab:gray")
    figure, axes = plt.subplots(figsize=(8, 0.75 * len(labels) + 0.8))
    bars = axes.barh(labels, lengths, color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("P(Yes); green: the answer")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    plt.show()


show(answer)

# %% [markdown]
# ## What it took, beside ordinary RAG on the same models
#
# On one machine without a GPU the drafts share two cores, so that five drafts cost five drafts: do
# not expect to win time here. The place for speculation is a server that batches.


# %%
def cost(name, answer):
    """Print what an answer took."""
    tokens = {role: answer.usage.tokens(role) for role in ("drafter", "verifier")}
    print(f"{name:12} {answer.trace.seconds:5.1f} s   {answer.text[:50]}")
    for role, count in tokens.items():
        if count.prompt:
            print(f"{'':12} {role}: {count.prompt} prompt + {count.completion} written tokens")


standard = StandardRAG(pair.verifier)
for row in questions()[1:3]:  # two more calls in the same kernel
    print(row.question, "→", " or ".join(row.answers))
    answer = rag.ask(row.question, row.passages)
    cost("speculative", answer)
    cost("standard", standard.ask(row.question, row.passages))
    show(answer)

# %% [markdown]
# ## Your own servers
#
# Nothing changes but the endpoints:

# %%
drafter = Endpoint("http://localhost:8001/v1", "qwen2.5-3b-instruct")
verifier = Endpoint("http://localhost:8000/v1", "qwen2.5-72b-instruct")
SpeculativeRAG(drafter=drafter, verifier=verifier)

# %% [markdown]
# Notebooks may `await` as well: `await rag.aask(question, passages)`, or
# `async for event in rag.astream(question, passages)` to watch drafts and scores arrive.

# %%
rag.close()
pair.close()
