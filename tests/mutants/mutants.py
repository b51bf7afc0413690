"""The mutants: one defect each, as a small change of the package that a test must notice.

`PEER` marks defects found in public implementations of Speculative RAG; the others are our own.
"""

from __future__ import annotations

from dataclasses import dataclass

PEER = "peer"
OWN = "own"


@dataclass(frozen=True)
class Mutant:
    """One defect."""

    name: str
    origin: str
    file: str
    edits: tuple[tuple[str, str], ...]
    """(old, new): each old text stands exactly once in the file."""
    tests: str
    """What has to notice, separated by spaces: `file` or `file::test`, both without `test_`."""


def mutant(name: str, origin: str, where: str, *edits: str) -> Mutant:
    """Return a mutant from `"module: tests"` and its old and new texts in turn."""
    module, _, tests = where.partition(": ")
    pairs = tuple(zip(edits[::2], edits[1::2], strict=True))
    return Mutant(name, origin, f"{module}.py", pairs, tests)


SELECTION = "selection: selection pipeline_rules"
SCORES = "scores: scores"
SPANS = "spans: spans"
DRAFTS = "drafts: drafts"
CITATIONS = "citations: citations"
ANSWERS = "answers: answers"
PIPELINE = "pipeline: pipeline_rules"

MUTANTS = [
    # ---------------------------------------------------------------- selection
    mutant(
        "the first draft always wins (argmax over a generator)",
        PEER,
        SELECTION,
        "(one.draft.truncated, -one.value, one.draft.index)",
        "one.draft.index",
    ),
    mutant("the worst draft wins", OWN, SELECTION, "-one.value", "one.value"),
    mutant(
        "ties go to the draft that came last",
        OWN,
        SELECTION,
        " one.draft.index)",
        " -one.draft.index)",
    ),
    mutant(
        "draft 0 is selected where nothing can be",
        PEER,
        SELECTION,
        "Selection(winner=None, ranking=()",
        "Selection(winner=0, ranking=()",
    ),
    mutant(
        "scores underflow to a tie of zeros",
        PEER,
        SELECTION,
        "value=score.value)",
        "value=math.exp(score.value))",
    ),
    mutant(
        "a missing score is 0, which is certainty",
        PEER,
        SELECTION,
        "value=score.value)",
        "value=score.value or 0.0)",
        "        and score.value is not None\n        and math.isfinite(score.value)\n",
        "",
    ),
    mutant("NaN and infinity are compared", OWN, SELECTION, "math.isfinite(score.value)", "True"),
    mutant("an abstention can be selected", OWN, SELECTION, "if not draft.abstained", "if True"),
    mutant(
        "a draft that was cut off ranks first",
        OWN,
        SELECTION,
        "(one.draft.truncated,",
        "(not one.draft.truncated,",
    ),
    mutant(
        "a draft that was cut off ranks with the whole ones",
        OWN,
        SELECTION,
        "(one.draft.truncated, ",
        "(",
    ),
    # ---------------------------------------------------------------- scores
    mutant(
        "one spelling of Yes only",
        PEER,
        SCORES,
        """text.strip(" \\t\\r\\n\\"'*_.,!:\\u2581\\u0120\\u010a").casefold()""",
        '{"Yes": "yes", "No": "no"}.get(text, "")',
    ),
    mutant(
        "the first spelling only",
        PEER,
        SCORES,
        "labels[spelled].append(math.exp(logprob))",
        "labels[spelled] = labels[spelled] or [math.exp(logprob)]",
    ),
    mutant(
        "the last spelling only",
        PEER,
        SCORES,
        "labels[spelled].append(math.exp(logprob))",
        "labels[spelled] = [math.exp(logprob)]",
    ),
    mutant(
        "the verdict by substring: eyes, know",
        PEER,
        SCORES,
        "        if spelled in labels:\n            labels[spelled]",
        "        for label in [name for name in labels if name in spelled]:\n"
        "            labels[label]",
    ),
    mutant(
        "P(Yes) is 0 unless the text is exactly Yes",
        PEER,
        SCORES,
        "value = judged.log_share if judged else None",
        "value = judged.log_share if judged and reply.text == 'Yes' else -100.0",
    ),
    mutant(
        "log-probabilities are asked for and ignored: 0.9 or 0.1 by the text",
        PEER,
        SCORES,
        "value = judged.log_share if judged else None",
        "value = math.log(0.9 if 'yes' in reply.text.lower() else 0.1)",
    ),
    mutant(
        "0.5 where neither label is listed",
        PEER,
        SCORES,
        "Judged(log_share=None, mass=0.0)",
        "Judged(log_share=math.log(0.5), mass=0.0)",
    ),
    mutant(
        "0.5 where one label is not listed",
        PEER,
        SCORES,
        "    share = (yes or bound)",
        "    if not yes or not no:\n        return Judged(log_share=math.log(0.5), mass=0.5)\n"
        "    share = (yes or bound)",
    ),
    mutant(
        "0 where Yes is not listed",
        PEER,
        SCORES,
        "share = (yes or bound) / ((yes or bound) + (no or bound))",
        "share = (yes or 1e-300) / (yes + no)",
    ),
    mutant(
        "P(Yes) is not renormalised",
        PEER,
        SCORES,
        "share = (yes or bound) / ((yes or bound) + (no or bound))",
        "share = min(1.0, yes or bound)",
    ),
    mutant("-inf is no special case", OWN, SCORES, "max(logprob, LOGPROB_FLOOR)", "logprob"),
    mutant(
        "NaN among the alternatives is added",
        OWN,
        SCORES,
        "        if not math.isnan(logprob)\n",
        "",
    ),
    mutant(
        "a single listed token is a verdict", OWN, SCORES, "if len(listed) < 2:", "if not listed:"
    ),
    mutant(
        "a draft without a rationale is scored by its answer alone",
        OWN,
        SCORES,
        "    if rationale and answer:\n",
        "    if answer:\n            rationale = rationale or answer\n",
    ),
    mutant("one bad question moves the tier", OWN, SCORES, "_STRIKES = 3", "_STRIKES = 1"),
    mutant("strikes are never forgotten", OWN, SCORES, "else 0\n", "else self._strikes\n"),
    mutant(
        "a verdict that is missing counts as a server that cannot",
        OWN,
        SCORES,
        "cannot=judged is None,",
        "cannot=value is None,",
    ),
    mutant(
        "different drafters are compared by their own word",
        OWN,
        SCORES,
        "if comparable_drafts:",
        "if True:",
    ),
    mutant(
        "the verifier's failure loses the question",
        PEER,
        "scores: scores pipeline_rules",
        "except EndpointError as error:",
        "except KeyError as error:",
    ),
    # ---------------------------------------------------------------- spans
    mutant(
        "sums are not normalised by length",
        PEER,
        SPANS,
        "return self.total / self.tokens",
        "return self.total",
    ),
    mutant(
        "exp of a sum underflows",
        PEER,
        SPANS,
        "return self.total / self.tokens",
        "return 2.718281828 ** self.total",
    ),
    mutant("a span takes one token more", PEER, SPANS, "if position < end", "if position <= end"),
    mutant(
        "a span takes one token before",
        PEER,
        SPANS,
        "(following > start or",
        "(following >= start or",
    ),
    mutant(
        "a span lacks its last token",
        OWN,
        SPANS,
        "if position < end",
        "if following < end",
    ),
    mutant(
        "a span lacks its first token",
        OWN,
        SPANS,
        "(following > start or",
        "(position >= start or",
    ),
    mutant(
        "the wrong place is read: that of the thinking before",
        PEER,
        SPANS,
        "base = stream.rfind(",
        "base = stream.find(",
    ),
    mutant(
        "the tokens before the answer are read",
        PEER,
        SPANS,
        "start = base + len(_bytes(text[: span.start]))",
        "start = base",
    ),
    mutant(
        "places are counted in characters, not in bytes",
        OWN,
        SPANS,
        "end = base + len(_bytes(text[: span.end]))",
        "end = base + span.end",
    ),
    mutant(
        "missing log-probabilities are certainty",
        PEER,
        SPANS,
        "    if not tokens or span.start >= span.end:\n        return None",
        "    if not tokens or span.start >= span.end:\n"
        "        return SpanLogprob(total=0.0, tokens=1)",
    ),
    mutant(
        "a text that is not in the tokens is placed all the same",
        OWN,
        SPANS,
        "    if base < 0:\n        return None",
        "    base = max(base, 0)",
    ),
    mutant(
        "headers are scored",
        PEER,
        SPANS,
        "span = _trimmed(visible, header.end(), cut)",
        "span = _trimmed(visible, header.start(), cut)",
    ),
    mutant(
        "the last of repeated answers is taken",
        OWN,
        SPANS,
        "next((span for span in answers if span.start >= first), answers[0])",
        "answers[-1]",
    ),
    mutant("thinking is read as text", OWN, SPANS, "text = _without_blocks(text)", "text = text"),
    mutant(
        "a text cut off has its last line for an answer",
        OWN,
        SPANS,
        "    if truncated:",
        "    if False:",
    ),
    mutant(
        "what follows the end of a turn is read",
        OWN,
        SPANS,
        ".ljust(len(text)) if turn else text",
        ".ljust(len(text)) if False else text",
    ),
    mutant(
        "an answer runs into what follows it",
        OWN,
        SPANS,
        "return found.start() if found",
        "return end if found",
    ),
    # ---------------------------------------------------------------- drafts
    mutant(
        "one failed draft fails all",
        PEER,
        "drafts: drafts pipeline_rules",
        "except EndpointError as error:",
        "except KeyError as error:",
    ),
    mutant(
        "an unreadable draft is verified as empty strings",
        PEER,
        "drafts: drafts pipeline_rules",
        "        except DraftFormatError as error:\n",
        "        except DraftFormatError as error:\n"
        "            return Draft(rationale='', answer='', subset=subset)\n",
    ),
    mutant(
        "mock log-probabilities",
        PEER,
        DRAFTS,
        "answer_logprob=span_logprob(reply.tokens, reply.text, spans.answer)",
        "answer_logprob=SpanLogprob(total=-0.05, tokens=1)",
    ),
    mutant(
        "the whole reply is scored, braces and headers and all",
        PEER,
        DRAFTS,
        "answer_logprob=span_logprob(reply.tokens, reply.text, spans.answer)",
        "answer_logprob=span_logprob(reply.tokens, reply.text, "
        "type(spans.answer)(0, len(reply.text)))",
    ),
    mutant(
        "the rationale's place is read for the answer",
        PEER,
        DRAFTS,
        "reply.text, spans.answer)",
        "reply.text, spans.rationale)",
    ),
    mutant(
        "drafts are sampled, not greedy",
        PEER,
        "models: drafts scores",
        "temperature: float = 0.0",
        "temperature: float = 1.0",
    ),
    mutant(
        "a cut-off draft does not say so",
        OWN,
        DRAFTS,
        'truncated = reply.finish_reason == "length"',
        "truncated = False",
    ),
    mutant(
        "an answer may be nothing but a citation",
        OWN,
        DRAFTS,
        "if not without_citations(answer).strip():",
        "if False:",
    ),
    mutant(
        "one drafter does all the work",
        OWN,
        DRAFTS,
        "self.models[subset.index % len(self.models)]",
        "self.models[0]",
    ),
    # ---------------------------------------------------------------- subsets
    mutant(
        "m is the size of the smallest cluster",
        PEER,
        "subsets: subsets::more_drafts_than_the_smallest_cluster_has_passages",
        "total = math.prod(len(group) for group in groups)",
        "total = min(len(group) for group in groups)",
    ),
    mutant(
        "subsets repeat: sampling with replacement, no uniqueness",
        PEER,
        "subsets: subsets::more_drafts_than_the_smallest_cluster_has_passages",
        "others = rng.sample(range(1, min(total, 2**62)), min(wanted, total) - 1)",
        "others = rng.choices(range(min(total, 2**62)), k=min(wanted, total) - 1)",
        "and len(set(ranks)) == len(ranks)",
        "",
    ),
    mutant(
        "more subsets are wanted than exist",
        PEER,
        "subsets: subsets::the_number_of_subsets_is_capped_where_no_more_exist",
        "min(wanted, total) - 1)",
        "wanted - 1)",
    ),
    mutant(
        "random subsets are drawn for ever where no more exist",
        PEER,
        "subsets: subsets::random_subsets_are_unique_and_end_with_all_there_are",
        "wanted = min(num_drafts, math.comb(count, size))",
        "wanted = num_drafts",
        "        while len(drawn) < wanted:\n",
        "        for turn in range(10_000):\n            assert turn < 9_999, 'for ever'\n"
        "            if len(drawn) >= wanted:\n                break\n",
    ),
    mutant(
        "the global random state is seeded",
        PEER,
        "subsets: subsets::the_same_question_gets_the_same_subsets",
        "rng = random.Random(seed)",
        "random.seed(seed)\n    rng = random",
    ),
    mutant(
        "k-means is not seeded",
        PEER,
        "subsets: subsets::the_same_question_gets_the_same_subsets",
        "random_state=seed",
        "random_state=None",
    ),
    mutant(
        "fewer passages than clusters crash",
        PEER,
        "subsets: subsets::as_few_passages_as_a_draft_reads_make_one_subset_of_all",
        "wanted = min(passages_per_draft - len(anchored), len(rest))",
        "wanted = passages_per_draft - len(anchored)",
        "    wanted = min(wanted, len(vectors))\n    distinct = min(wanted, ",
        "    distinct = max(wanted, ",
    ),
    mutant(
        "without embeddings the retriever's score is clustered",
        PEER,
        "subsets: subsets::without_embeddings_texts_are_clustered_by_their_words",
        "return _unit_rows(_tfidf(",
        "return np.array([[1.0, float(p.score or 0)] for p in passages])\n"
        "    return _unit_rows(_tfidf(",
    ),
    mutant(
        "clusters are dealt round robin over the rank",
        PEER,
        "subsets: subsets::every_subset_has_one_passage_of_each_cluster",
        "clusters = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]",
        "clusters = [list(range(i, len(vectors), wanted)) for i in range(wanted)]",
    ),
    mutant(
        "later subsets shrink",
        PEER,
        "subsets: subsets::every_subset_has_one_passage_of_each_cluster",
        "        yield members",
        "        yield members[: max(1, len(members) - (number == numbers[-1]))]",
    ),
    mutant(
        "the anchor is dropped",
        OWN,
        "subsets: subsets::anchored_passages_are_in_every_subset",
        "sorted([*anchored, *(rest",
        "sorted([*(rest",
    ),
    mutant(
        "notes are lost",
        OWN,
        "subsets: subsets::the_number_of_subsets_is_capped_where_no_more_exist",
        "notes=tuple(notes))",
        "notes=())",
    ),
    mutant(
        "vectors that are not finite are clustered",
        OWN,
        "subsets: subsets::embeddings_that_are_not_finite_are_named_and_replaced",
        "if np.isfinite(array).all():",
        "if True:",
    ),
    mutant(
        "the embedder does not hear the question",
        OWN,
        "subsets: subsets::an_embedder_reads_title_and_text_of_all_passages",
        "asyncio.to_thread(embedder, texts, question)",
        'asyncio.to_thread(embedder, texts, "")',
    ),
    mutant(
        "partitioning blocks the loop",
        OWN,
        "subsets: subsets::the_loop_stays_free_while_subsets_are_made",
        "found = await asyncio.to_thread(\n        partitioner.partition,\n",
        "found = partitioner.partition(\n",
    ),
    mutant(
        "a partitioner may return what it likes",
        OWN,
        "subsets: subsets::a_partitioner_that_breaks_its_promise_is_named",
        "    if not (kept and ",
        "    if False and not (kept and ",
    ),
    mutant(
        "lengths decide the cluster",
        OWN,
        "subsets: subsets::vectors_beyond_the_range_of_squares_are_compared_all_the_same",
        "    return _divided(array, np.linalg.norm(array, axis=1, keepdims=True))",
        "    return array",
        "    array = _divided(array, np.abs(array).max(axis=1, keepdims=True))\n",
        "",
    ),
    # ---------------------------------------------------------------- passages
    mutant(
        "repeated passages are kept", OWN, "passages: passages", "elif key in seen:", "elif False:"
    ),
    mutant("empty passages are kept", OWN, "passages: passages", "if not key[1]:", "if False:"),
    mutant(
        "a passage's text is in its repr",
        OWN,
        "passages: passages",
        "text: str = field(repr=False)",
        "text: str",
    ),
    # ---------------------------------------------------------------- citations
    mutant(
        "citations of passages that do not exist are kept",
        OWN,
        CITATIONS,
        "return _CITATION.sub(kept, text).strip()",
        "return text.strip()",
    ),
    mutant(
        "numbers that do not exist are counted",
        OWN,
        CITATIONS,
        "for number in numbers if 1 <= number <= passages))",
        "for number in numbers))",
    ),
    mutant("years are citations", OWN, CITATIONS, '_NUMBERS = r"\\d{1,2}', '_NUMBERS = r"\\d{1,4}'),
    mutant(
        "an abstention is what begins like one",
        OWN,
        CITATIONS,
        "return _ABSTENTION.match(bare) is not None",
        'return bare.casefold().startswith(("unknown", "no", "n/a", "the passages"))',
    ),
    mutant(
        "nothing is an abstention",
        PEER,
        CITATIONS,
        "return _ABSTENTION.match(bare) is not None",
        "return False",
    ),
    # ---------------------------------------------------------------- answers
    mutant(
        "tokens nobody counted are 0",
        OWN,
        ANSWERS,
        "return sum(known) if known else None",
        "return sum(known)",
    ),
    mutant(
        "tokens of both roles are added",
        OWN,
        ANSWERS,
        "for step in self.steps if step.role == role]",
        "for step in self.steps]",
    ),
    mutant(
        "the answer is its own rival",
        OWN,
        ANSWERS,
        "    groups.pop(normal_answer(text), None)\n",
        "",
    ),
    mutant(
        "a rival's score that is missing is 0",
        OWN,
        ANSWERS,
        'return float("-inf") if value is None else value',
        "return value or 0.0",
    ),
    # ---------------------------------------------------------------- the pipeline
    mutant(
        "drafts are written one after the other",
        PEER,
        "pipeline: pipeline_rules::drafts_are_written_at_the_same_time",
        "            await tasks.all_of(\n                [draft_then_verify(index) for index in "
        "range(len(partition.subsets))]\n            )",
        "            for index in range(len(partition.subsets)):\n"
        "                await draft_then_verify(index)",
    ),
    mutant(
        "verifications wait for each other",
        PEER,
        "pipeline: pipeline_rules::verifications_do_not_wait_for_each_other",
        "                    verification = tasks.start(",
        "                    for _, earlier in list(verifications.values()):\n"
        "                        await asyncio.wait([earlier])\n"
        "                    verification = tasks.start(",
    ),
    mutant(
        "equal drafts are verified each",
        OWN,
        "pipeline: pipeline::equal_drafts_are_verified_once",
        "if key not in verifications:",
        "if True:",
    ),
    mutant(
        "standard RAG is asked although a draft won",
        OWN,
        PIPELINE,
        "if selection.winner is not None:",
        "if False:",
    ),
    mutant(
        "the answer loses its passages",
        PEER,
        PIPELINE,
        "            passages=winner.passages,\n",
        "            passages=(),\n",
    ),
    mutant(
        "the answer has all passages for its own",
        OWN,
        PIPELINE,
        "            passages=winner.passages,\n",
        "            passages=work.passages,\n",
    ),
    mutant(
        "scores of different tiers are compared",
        OWN,
        "pipeline: pipeline_rules::a_draft_whose_verification_failed_is_not_selected",
        "if score.tier == self.tier.name]",
        "]",
        "            if not drafts or candidates_of(drafts, work.current_scores):\n",
        "            drafts = [d for d in drafts if not candidates_of([d], work.scores)]\n"
        "            if not drafts:\n",
    ),
    mutant(
        "the trace loses its notes",
        OWN,
        "pipeline: pipeline_rules::everything_left_out_or_cut_short_is_in_the_trace",
        "notes=tuple(self.notes),",
        "notes=(),",
    ),
    mutant(
        "abstentions are verified",
        OWN,
        "pipeline: pipeline_rules::a_draft_that_answers_nothing_is_not_verified",
        "if isinstance(draft, Draft) and not draft.abstained:",
        "if isinstance(draft, Draft):",
    ),
    mutant(
        "the deadline is ignored while drafting",
        OWN,
        "pipeline: pipeline::at_the_deadline_the_best_scored_draft_wins",
        "scope = asyncio.timeout(work.clock.left)",
        "scope = asyncio.timeout(None)",
    ),
    # ---------------------------------------------------------------- the wire
    mutant(
        "a refused request is sent again",
        OWN,
        "failures: endpoint::lasting_refusals_are_not_tried_again",
        "or status >= 500:",
        "or status >= 400:",
    ),
    mutant(
        "two layers of retries multiply",
        PEER,
        "endpoint: endpoint::passing_failures_are_tried_again_exactly_so_often",
        '"max_retries": 0',
        '"max_retries": 2',
    ),
    mutant(
        "Retry-After is ignored",
        OWN,
        "retries: endpoint::retry_after_is_waited_for",
        "error.retry_after is not None:\n        return error.retry_after",
        "error.retry_after is not None:\n        return 0.0",
    ),
    mutant(
        "a log-probability that is missing is 0",
        PEER,
        "replies: replies",
        "or math.isnan(value):\n        return None",
        "or math.isnan(value):\n        return 0.0",
    ),
    mutant(
        "one filler of -9999 drowns a mean",
        OWN,
        "replies: replies",
        "max(float(value), LOGPROB_FLOOR)",
        "float(value)",
    ),
    mutant(
        "an array of nothing but fillers is believed",
        OWN,
        "replies: replies",
        "    if all(token.logprob <= LOGPROB_FLOOR for token in usable):",
        "    if False:",
    ),
    mutant(
        "a verifier that cannot is never learnt about at the deadline",
        OWN,
        "pipeline: pipeline::a_verifier_without_logprobs_is_learnt_from_at_the_deadline_too",
        "if any(score.cannot for score in work.current_scores):",
        "if False:",
    ),
    # ---------------------------------------------------------------- standard RAG
    mutant(
        "a stream shows a citation that is not there",
        OWN,
        "standard: standard::the_pieces_are_the_text_wherever_they_are_cut",
        'self._raw if ended else _UNDECIDED.sub("", self._raw)',
        "self._raw",
    ),
    mutant(
        "passages beyond the context are sent all the same",
        PEER,
        "standard: standard::passages_are_fitted_by_the_servers_tokeniser",
        "if await fits(passages):",
        "if True:",
    ),
    mutant(
        "one passage that is too long keeps out all behind it",
        OWN,
        "standard: standard::a_passage_that_is_too_long_by_itself_is_passed_over",
        "for passage in passages if await fits([passage])]",
        "for passage in passages]",
    ),
    mutant(
        "the top-ranked passage is read by chance",
        PEER,
        "subsets: subsets::the_first_subset_holds_the_best_of_each_cluster",
        "others = rng.sample(range(1, min(total, 2**62)), min(wanted, total) - 1)\n"
        "    for number in [0, *others]:",
        "others = rng.sample(range(min(total, 2**62)), min(wanted, total))\n"
        "    for number in others:",
    ),
    mutant(
        "an error repeats the prompt that the server echoes",
        OWN,
        "failures: pipeline::what_a_server_echoes_reaches_no_log_or_repr",
        'return text[: min(places)] + "…" if places else text',
        "return text",
    ),
    mutant(
        "a draft that copies the prompt's example is believed",
        OWN,
        "drafts: drafts::an_unreadable_reply_is_a_failed_draft_that_keeps_its_text",
        "if _is_copied(answer, subset):",
        "if False:",
    ),
    mutant(
        "failed drafts are left out of the notes",
        OWN,
        "pipeline: pipeline::failed_and_abstaining_drafts_are_in_the_notes",
        "work.note(*work.failures)\n        work.emit(Sel",
        "work.emit(Sel",
    ),
]
