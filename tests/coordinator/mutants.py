"""Deliberate faults in the coordinator, each of which a test must see: the simulator, or a unit test named here.

``python -m tests.coordinator.mutants`` makes them one by one and prints what killed each; ``test_mutants`` does so in
the test suite. A mutant is named after the behaviour that it breaks. It says which function does that, and what stands
there instead, as ``tests.coordinator.mutate`` has it.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier_core.values import MissReason
from tests.coordinator import (
    test_admission,
    test_break_even,
    test_cascades,
    test_chain_order,
    test_endpoints,
    test_faults,
    test_filters,
    test_groups,
    test_hints,
    test_late_loads,
    test_missed,
    test_primary,
    test_promotions,
    test_quarantine,
    test_request_level,
    test_reset,
)
from tests.coordinator.mutate import changed
from tests.sim.random_run import Simulation
from tests.sim.scripted import Answer, JobHook

SEEDS = 60
STEPS = 800


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault: at *place*, *old* becomes *new*. Without *killer* the simulator must see it."""

    name: str
    place: str
    old: str
    new: str
    killer: Callable[[], None] | None = None


def _m(name: str, place: str, old: str, new: str, killer: Callable[[], None] | None = None) -> Mutant:
    return Mutant(name=name, place=f"kvtier_core.{place}", old=old, new=new, killer=killer)


MUTANTS: Sequence[Mutant] = (
    # -- hints
    _m(
        "a pin gives way",
        "coordinator.holds:Holds.make_room",
        "hold.rank < _PINNED",
        "True",
        test_hints.test_pinned_blocks_stay_when_others_need_the_room,
    ),
    _m("pins have no share", "coordinator.holds:Holds._has_place", "not is_more", "True"),
    _m("a hold outlives its block", "coordinator.state:State.detach", "self.holds.lost(promised)", ""),
    _m(
        "a hold never ends",
        "coordinator.coordinator:Coordinator.tick",
        "self._state.holds.expire(now)",
        "",
        test_hints.test_pinned_blocks_leave_when_their_time_is_over,
    ),
    _m(
        "retained blocks leave by chance",
        "coordinator.holds:Holds.make_room",
        'sorted(self._holds, key=attrgetter("rank", "until"))',
        "[*self._holds]",
        test_hints.test_retained_blocks_leave_last_the_lowest_priority_and_the_ends_first,
    ),
    _m(
        "what others used is dropped",
        "coordinator.coordinator:Coordinator._drop",
        "block.chain == request.info.chain",
        "True",
        test_hints.test_what_another_request_used_is_not_dropped,
    ),
    _m(
        "a prefetch keeps its promises",
        "coordinator.prefetches:Prefetches.go_on",
        "leases.give_back(self._state, request)",
        "",
        test_hints.test_a_prefetch_brings_blocks_that_nobody_asks_for,
    ),
    # -- pins, leases, rows
    _m(
        "a device load is never unpinned",
        "coordinator.coordinator:Coordinator.complete_load",
        "self._state.ledger.unpin(job.blocks)",
        "",
    ),
    _m(
        "leases outlive their request",
        "coordinator.coordinator:Coordinator.request_finished",
        "leases.give_back(self._state, request)",
        "",
    ),
    _m(
        "leases lapse while a promotion is waited for",
        "coordinator.leases:expire",
        "not request.leases or request.promoting or request in state.planned",
        "not request.leases",
        test_promotions.test_c13_a_request_that_waits_for_a_promotion_keeps_its_leases,
    ),
    _m(
        "leases never lapse",
        "coordinator.leases:expire",
        "request.last_lookup <= now - timeout",
        "request.last_lookup < 0",
        test_groups.test_c13_a_remembered_answer_renews_the_leases_it_stands_on,
    ),
    _m(
        "hits are not leased before rows are reserved",
        "coordinator.lookups:Lookups._commit",
        "leases.grant(state, request, [block.key for block in plan.hold])",
        "",
    ),
    _m(
        "an end point that moved keeps its leases",
        "coordinator.lookups:Lookups.lookup",
        "leases.keep_only(self._state, request, [block.key for block in plan.hold])",
        "",
    ),
    _m(
        "a load takes rows whose bytes are still arriving",
        "coordinator.coordinator:Coordinator.prepare_load",
        "state.ledger.ready_prefix(keys)",
        "[key for key in keys if state.ledger.find(key) is not None]",
        test_primary.test_c12_a_load_takes_no_block_whose_bytes_are_arriving,
    ),
    _m(
        "one request's filter decides for another",
        "coordinator.cascades:Cascades.prepare",
        "any(block.withheld for block in held)",
        "False",
        test_filters.test_b5_a_block_on_its_way_goes_to_the_tiers_of_everybody_who_offered_it,
    ),
    _m(
        "what a filter kept from a tier is given at every offer",
        "coordinator.cascades:Cascades._cascade",
        "block.withheld -= {tier.name}",
        "",
        test_filters.test_b5_a_block_in_the_pool_goes_to_the_tier_that_a_filter_kept_it_from_once,
    ),
    _m(
        "what is not looked for in a tier is taken for absent there",
        "coordinator.lookups:Lookups.lookup",
        "request.load_tiers is None and found.reason in _NOWHERE",
        "found.reason in _NOWHERE",
        test_filters.test_b5_whether_a_tier_holds_a_block_is_not_decided_by_a_filter_on_loads,
    ),
    # -- chains
    _m(
        "a piece of a prompt does not know its request",
        "coordinator.cascades:Cascades.prepare",
        "request.info.chain",
        "0",
        partial(test_chain_order.test_r3_pieces_of_one_prompt_leave_from_its_end, "lru"),
    ),
    _m(
        "what a request read stays in the chain of who wrote it",
        "coordinator.leases:_unlease",
        "state.ledger.unlease(keys, request.used, chain=request.info.chain, depth=depth)",
        "state.ledger.unlease(keys, request.used)",
        test_chain_order.test_r3_what_was_read_and_what_was_added_are_one_chain,
    ),
    _m(
        "a chain stays where its first piece came",
        "policies.order:Order._last",
        "self._batches.move_to_end(chain)",
        "",
        test_chain_order.test_r3_a_chain_is_as_recent_as_its_last_piece,
    ),
    _m(
        "blocks that came out of turn leave as they came", "policies.order:Order.take", "batch.sort()", "pass"
    ),
    _m(
        "what a tier missed is never made up for",
        "coordinator.coordinator:Coordinator.tick",
        "self._cascades.make_up(now)",
        "",
        test_missed.test_v7_a_burst_reaches_the_tier_while_the_engine_is_idle,
    ),
    _m(
        "a tier at work is made up to beyond its limit",
        "coordinator.cascades:Cascades.make_up",
        "not tier.missed or tier.cascade_rows or tier.late",
        "not tier.missed or tier.late",
    ),
    _m(
        "what a tier was given meanwhile is made up for as well",
        "coordinator.cascades:Cascades._make_up",
        "tier.presence.classify([block.key for block in blocks], now)",
        "[False] * len(blocks)",
        test_missed.test_v7_what_was_stored_anew_and_given_meanwhile_comes_once,
    ),
    _m(
        "what a tier held already counts as stored",
        "coordinator.cascades:Cascades.finish",
        "len(set(stored).difference(held)) if held else len(stored)",
        "len(stored)",
        test_cascades.test_b12_what_a_tier_held_already_is_not_counted_as_stored,
    ),
    _m(
        "a job that moved nothing shows that a tier is well",
        "coordinator.results:Results._note_service",
        "not faulty and (job.kind is JobKind.LOOKUP or _has_moved(job, bad, result))",
        "not faulty",
        partial(test_cascades.test_a_breaker_stays_open_while_nothing_moves, JobHook.STORE),
    ),
    # -- promotions
    _m(
        "an overdue load's rows are free at once",
        "coordinator.promotions:Promotions.quarantine",
        "state.detach(block for block in job.blocks if block.state is ARRIVING)",
        "state.detach(block for block in job.blocks if block.state is ARRIVING)\nstate.ledger.unpin(job.blocks)",
    ),
    _m(
        "what came of an overdue load may be evicted while its tier may touch it",
        "coordinator.promotions:Promotions.expire",
        "self._make_ready(job, [block for block in job.blocks if block.key in arrived], pins=1)",
        "self._make_ready(job, [block for block in job.blocks if block.key in arrived])",
    ),
    _m(
        "what came of an overdue load is lost with the rest",
        "coordinator.promotions:Promotions.expire",
        "block.key in arrived",
        "not job.blocks",
        test_late_loads.test_b8_what_came_before_the_deadline_is_a_hit_and_the_rest_is_a_miss,
    ),
    _m(
        "what a tier takes back of an overdue load stays",
        "coordinator.promotions:Promotions.finish",
        "state.detach(taken_back)",
        "",
        test_late_loads.test_b8_a_result_that_takes_back_what_came_makes_it_a_miss,
    ),
    _m(
        "a late result makes its blocks ready",
        "coordinator.promotions:Promotions.finish",
        "job.overdue",
        "False",
    ),
    _m(
        "reserved rows are counted for ever",
        "coordinator.promotions:Promotions.finish",
        "self._release(job.tier, len(job.blocks))",
        "",
    ),
    _m(
        "a tier is lent all it wants before a load of it came in time",
        "coordinator.lookups:Lookups._choose",
        "rooms[tier] > 0",
        "True",
    ),
    _m(
        "a tier that hung is trusted as before",
        "coordinator.promotions:Promotions.expire",
        "tier.loads_in_time = False",
        "",
        test_quarantine.test_c31_a_tier_that_hung_once_is_lent_little_until_a_load_comes_in_time_again,
    ),
    _m(
        "a tier never shows that its loads come in time",
        "coordinator.promotions:Promotions.finish",
        "tier.loads_in_time = True",
        "",
        test_quarantine.test_c31_a_tier_whose_load_came_in_time_may_load_a_whole_prompt_at_once,
    ),
    _m(
        "overdue loads don't count against what all tiers may hold",
        "coordinator.state:State.promotion_room",
        "self.promoting_rows + self.quarantined_rows",
        "self.promoting_rows",
        partial(test_quarantine.test_c31_however_many_tiers_hang_a_share_of_the_pool_stays_for_stores, 4),
    ),
    _m(
        "behind a block that has to wait others are promoted",
        "coordinator.lookups:Lookups._choose",
        "promotions = 0",
        "",
        test_quarantine.test_c21_behind_a_block_that_has_to_wait_for_its_tier_nothing_is_promoted,
    ),
    _m(
        "a tier is asked however many answers it owes",
        "coordinator.tier_record:TierRecord.may_ask",
        "self.lookups.owes",
        "False",
        test_faults.test_c31_a_tier_that_answers_no_lookup_is_asked_no_more_than_its_limit,
    ),
    _m(
        "a tier gets stores however many answers it owes",
        "coordinator.tier_record:TierRecord.may_store",
        "self.stores.owes",
        "False",
        test_faults.test_c31_a_tier_that_answers_no_store_gets_no_more_than_its_limit_and_serves_what_it_holds,
    ),
    _m(
        "a request tries what it could not load for ever",
        "coordinator.tier_answers:TierAnswers._known",
        "reason if until > now else answers[index]",
        "answers[index]",
        partial(
            test_promotions.test_k6_o1_however_soon_a_lost_key_may_be_asked_for_again_no_request_waits_for_it_twice,
            0.0,
            Answer.MISSING,
            "r",
        ),
    ),
    _m(
        "a promotion leaves twice",
        "coordinator.promotions:Promotions.submit_planned",
        "planned, state.planned = state.planned, {}",
        "planned = state.planned",
    ),
    _m(
        "nobody inherits a promotion",
        "coordinator.promotions:Promotions.hand_over_planned",
        "self._heir(block, name, request, waiting)",
        "None",
        test_promotions.test_c21_c26_a_promotion_handed_over_leaves_under_the_heirs_name,
    ),
    _m(
        "a promotion is inherited by who may not load from that tier",
        "coordinator.promotions:Promotions._heir",
        "other.may_load_from(tier)",
        "True",
        test_promotions.test_c27_a_promotion_is_not_handed_to_a_request_that_may_not_load_from_that_tier,
    ),
    _m(
        "a key that could not be loaded is asked for again at once",
        "coordinator.promotions:Promotions.finish",
        "tier.presence.lost(key, lost[key], now)",
        "",
        partial(test_promotions.test_k6_o1_a_bad_block_is_loaded_once_for_all_requests, Answer.FAILED),
    ),
    _m(
        "more rows are reserved than the limit allows",
        "coordinator.lookups:Lookups._choose",
        "len(plan.promote) < promotions",
        "len(plan.promote) <= promotions",
    ),
    _m(
        "blocks are promised behind a key that no tier has spoken about",
        "coordinator.lookups:Lookups._choose",
        "break",
        "continue",
        test_groups.test_c21_nothing_is_promised_behind_a_key_that_no_tier_has_spoken_about,
    ),
    _m(
        "blocks of a window are loaded while the end point may move",
        "coordinator.lookups:Lookups._choose",
        "is_certain",
        "True",
        test_groups.test_c21_nothing_of_a_window_is_loaded_while_the_end_point_may_move,
    ),
    _m(
        "idle blocks take no room",
        "coordinator.group_lookup:GroupLookup.count_costs",
        "block is None or is_idle(block)",
        "block is None",
    ),
    # -- end points and waiting
    _m(
        "a window begins one token late",
        "coordinator.endpoints:GroupShape.needed",
        "end - self.window",
        "end - self.window + 1",
        test_endpoints.test_c21_holes_windows_and_room_by_hand,
    ),
    _m(
        "an end point must leave a row free",
        "coordinator.endpoints:find_ends",
        "rows <= room",
        "rows < room",
        test_endpoints.test_c21_holes_windows_and_room_by_hand,
    ),
    _m(
        "a hole in a window is overlooked",
        "coordinator.endpoints:find_ends",
        "blocked[needed.start]",
        "blocked[max(needed.start, needed.stop - 1)]",
        test_endpoints.test_c21_holes_windows_and_room_by_hand,
    ),
    _m(
        "requests wait for ever",
        "coordinator.tier_answers:TierAnswers.bound_waiting",
        "now >= request.wait_until",
        "False",
        test_promotions.test_k6_o3_answers_that_lapse_at_once_do_not_make_a_request_wait_for_ever,
    ),
    _m(
        "a pending answer is kept when what it waits for has come",
        "coordinator.state:State.is_pending",
        "(event != self.departure) if job is None else job.overdue",
        "False",
    ),
    _m(
        "a pending answer is kept when another request brings the block",
        "coordinator.state:State.is_pending",
        "self.ledger.holds_any(pending.unsure)",
        "False",
    ),
    _m(
        "a tier that was left out is asked all the same",
        "coordinator.tier_answers:TierAnswers.judge",
        "request.may_load_from(tier.name)",
        "True",
        test_promotions.test_c27_a_request_loads_only_from_the_tiers_it_may,
    ),
    # -- results
    _m(
        "wrong bytes become visible",
        "coordinator.results:bad_keys",
        "bad.update(dict.fromkeys(finished.corrupt, MissReason.INTEGRITY))",
        "",
    ),
    _m(
        "failed keys become visible",
        "coordinator.results:bad_keys",
        "bad.update(dict.fromkeys(result.failed, MissReason.TIER_FAILED))",
        "",
        partial(
            test_promotions.test_c23_what_loaded_is_kept_and_the_rest_is_a_miss,
            Answer.FAILED,
            MissReason.TIER_FAILED,
        ),
    ),
    _m(
        "a lookup's answer from before a reset is believed",
        "coordinator.results:Results.finish",
        "if not job.stale:\n    tier.presence.take_answer(job, finished.result, bad, now)",
        "if True:\n    tier.presence.take_answer(job, finished.result, bad, now)",
        test_reset.test_k7_o4_a_lookup_of_an_earlier_epoch_says_nothing_about_the_new_one,
    ),
    # -- reset
    _m(
        "what was computed before a reset is stored after it",
        "coordinator.coordinator:Coordinator.reset",
        "request.may_store = False",
        "",
    ),
    _m(
        "a preempted request goes on storing",
        "coordinator.coordinator:Coordinator.request_preempted",
        "self._state.going_on(request_id).may_store = False",
        "self._state.going_on(request_id)",
        test_reset.test_v1_c04_what_a_preempted_request_offers_is_not_stored_before_it_begins_anew,
    ),
    _m(
        "a reset leaves ready blocks visible",
        "coordinator.coordinator:Coordinator.reset",
        "state.detach(state.ledger.blocks)",
        "",
    ),
    _m(
        "a reset forgets the device stores under way",
        "coordinator.coordinator:Coordinator.reset",
        "state.give_up(job)\nself._cascades.expire_device_store(job)",
        "",
    ),
    _m(
        "a tier serves on after a reset that it has not heard of",
        "coordinator.coordinator:Coordinator.reset",
        "tier.serving = False",
        "",
    ),
    # -- cascades and requests
    _m(
        "a request is over while a device store is under way",
        "coordinator.state:State.forget_if_over",
        "request.device_stores",
        "False",
    ),
    _m(
        "a request is over while tiers still get blocks of it",
        "coordinator.state:State.forget_if_over",
        "request.late",
        "False",
    ),
    _m(
        "a store is unpinned twice",
        "coordinator.cascades:Cascades.finish",
        "if job.overdue:\n    return",
        "",
    ),
    _m(
        "one row too many is pinned for a tier",
        "coordinator.cascades:Cascades.has_room",
        "tier.cascade_rows < tier.max_cascade_rows",
        "tier.cascade_rows <= tier.max_cascade_rows",
    ),
    _m(
        "the filter of tiers to store to is not heeded",
        "coordinator.cascades:Cascades._may_cascade",
        "request.may_store_to(tier.name)",
        "True",
        test_cascades.test_c27_a_request_is_stored_only_in_the_tiers_it_may,
    ),
    _m(
        "sealing holds no pins of its own",
        "coordinator.cascades:Cascades._cascade_all",
        "1 + len(tiers)",
        "len(tiers)",
        test_cascades.test_c03_a_row_waits_for_its_sealing_however_late_and_is_not_another_blocks_meanwhile,
    ),
    _m(
        "a row that no tier took is believed to be sealed",
        "coordinator.cascades:Cascades.store",
        "not b.is_sealed",
        "False",
    ),
    # -- whole requests
    _m(
        "a whole request's block is given again and again",
        "coordinator.request_level:RequestLevel._give",
        "given.update((block.key, True) for block in taken)",
        "",
    ),
    _m(
        "a block that will never come is waited for",
        "coordinator.request_level:RequestLevel.lost",
        "request.late -= 1",
        "",
        partial(
            test_request_level.test_c26_c25_the_end_waits_for_nothing_that_will_never_come, "device deadline"
        ),
    ),
    _m(
        "a block that was evicted meanwhile is given",
        "coordinator.request_level:RequestLevel._take",
        "not may_store or block is None or block.state is not READY",
        "not may_store",
    ),
    _m(
        "a late answer is heeded for another request of that name",
        "coordinator.coordinator:Coordinator.on_request_level",
        "request is not None and request.info is info",
        "request is not None",
        test_request_level.test_c25_an_answer_to_an_earlier_request_of_the_same_name_is_ignored,
    ),
    _m(
        "the tier is not told what it did not get",
        "coordinator.state:State.forget_if_over",
        "not given",
        "False",
    ),
    _m(
        "a reset leaves blocks of the old epoch waiting for a tier",
        "coordinator.request_level:RequestLevel.reset",
        "tier.late.clear()",
        "",
    ),
    # -- breaker and break-even
    _m(
        "the breaker never opens",
        "coordinator.breaker:Breaker.failed",
        "self._limit",
        "10**9",
        test_faults.test_c31_repeated_failures_take_a_tier_out_and_a_probe_brings_it_back,
    ),
    _m(
        "the breaker's pauses do not grow",
        "coordinator.breaker:Breaker.failed",
        "min(self._pause * 2, self._max_pause)",
        "self._pause",
        test_faults.test_c31_the_pauses_of_a_breaker_grow_to_their_limit_and_start_anew_after_a_success,
    ),
    _m(
        "a request waits for a lookup that is a probe",
        "coordinator.tier_answers:TierAnswers.judge",
        "not all(tier.lookups.breaker.is_closed for tier in tiers)",
        "False",
        test_faults.test_c31_a_lookup_that_is_a_probe_is_waited_for_by_nobody_and_brings_the_tier_back,
    ),
    _m(
        "break-even is decided the wrong way round",
        "coordinator.break_even:BreakEven._is_loss",
        "load_s <= self.patience_s(name, groups, end)",
        "load_s > self.patience_s(name, groups, end)",
        test_break_even.test_c35_a_run_that_takes_longer_than_computing_it_is_passed_over_before_a_row_is_taken,
    ),
    _m(
        "a load that hangs is waited for longer than computing takes",
        "coordinator.promotions:Promotions.submit_planned",
        "request.patience.pop(name)",
        "request.patience.pop(name) + 1e9",
        test_break_even.test_c35_what_the_pool_has_already_is_not_waited_for,
    ),
    _m(
        "a tier that is passed over is never probed",
        "coordinator.break_even:BreakEven._is_loss",
        "now >= tier.probe_at",
        "now >= 10**9",
        test_break_even.test_c35_a_tier_that_is_passed_over_is_probed_at_intervals_and_comes_back_when_it_is_faster,
    ),
    _m(
        "an evicted block is told as not stored",
        "coordinator.lookups:Lookups._count_miss",
        "key in self._state.evicted",
        "False",
        test_primary.test_c60_a_block_that_was_evicted_is_told_from_one_not_stored,
    ),
    # -- ledger, leases, policies
    _m(
        "a use counts each time that a promise ends",
        "ledger:Ledger.unlease",
        "[block for block in blocks if block.key not in known] if known else blocks",
        "blocks",
        partial(test_primary.test_c14_recency_counts_once_per_request_and_key, "arc"),
    ),
    _m(
        "a block that arrives under a lease counts as idle",
        "ledger:Ledger.make_ready",
        "len(keys) - self._count_leased(keys)",
        "len(keys)",
    ),
    _m(
        "a load's blocks keep their leases",
        "coordinator.leases:end",
        "_unlease(state, request, leased, _ABOVE_ALL + request.read)",
        "",
    ),
    _m(
        "a held block that was met is forgotten",
        "policies.order:Order._take_each",
        "entry.place = self._aside\nself._aside.left += 1",
        "",
    ),
    _m(
        "a batch leaves as a whole though a block of it is held",
        "policies.order:Order._take_tail",
        "entry.place is not batch or entry.pins",
        "entry.place is not batch",
    ),
    _m(
        "a batch leaves as a whole though a block of it is promised",
        "policies.order:Order._take_tail",
        "if keep and (not keep.isdisjoint([entry.key for entry in tail])):\n    return False",
        "",
    ),
    _m(
        "a promised block leaves",
        "policies.order:Order._take_each",
        "entry.pins or entry.key in keep",
        "entry.pins",
    ),
    _m(
        "a block that is pinned and promised is taken from the idle ones twice",
        "ledger:Ledger.lease",
        "len(fresh) - len(self._pinned & fresh)",
        "len(fresh)",
    ),
    _m(
        "a promised block that is pinned is taken from the idle ones twice",
        "ledger:Ledger.pin",
        "len(taken) - self._count_leased(taken)",
        "len(taken)",
    ),
    _m(
        "a promised block is idle when its last pin is gone",
        "ledger:Ledger.unpin",
        "[block for block in unpinned if block.key not in leases] if leases else unpinned",
        "unpinned",
    ),
    _m(
        "a block is idle when one of its promises ends",
        "ledger:Ledger.unlease",
        "last = [key for key in keys if key not in more]",
        "",
    ),
    _m(
        "a ready block still counts as arriving",
        "ledger:Ledger.make_ready",
        "self._arriving.difference_update(keys)",
        "",
    ),
    _m(
        "a detached block still counts as arriving",
        "ledger:Ledger.detach",
        "self._arriving.remove(block.key)",
        "",
    ),
    _m(
        "a block without pins still counts as pinned",
        "ledger:Ledger.unpin",
        "self._pinned.difference_update([block.key for block in unpinned])",
        "",
    ),
    _m(
        "a detached block still counts as pinned",
        "ledger:Ledger.detach",
        "self._pinned.discard(block.key)",
        "",
    ),
    _m(
        "an arriving block is answered as there",
        "ledger:Ledger.ready_prefix",
        "self._arriving and (not self._arriving.isdisjoint(ready))",
        "False",
    ),
    _m(
        "a block that is arriving could be loaded at once",
        "ledger:Ledger.are_ready",
        "key in blocks and key not in arriving",
        "key in blocks",
    ),
    _m(
        "what was kept from an eviction stays promised",
        "ledger:Ledger.reserve",
        "self.unlease(kept, known=kept)",
        "",
    ),
    _m("a promise outlives its block", "ledger:Ledger.detach", "self.leases.remove(block.key)", ""),
    _m(
        "a second promise outlives its block",
        "ledger:Ledger.detach",
        "self._more_leases.pop(block.key, None)",
        "",
    ),
    _m(
        "a second promise of a key is none", "ledger:Ledger.lease", "more[key] = more.get(key, 0) + 1", "pass"
    ),
    _m(
        "a request believes in a promise that has lost its block",
        "coordinator.state:State.detach",
        "request.leases -= promised",
        "",
    ),
    _m(
        "an offer of a promised block takes its use away",
        "coordinator.leases:use",
        "[block.key for block, _ in fresh]",
        "[block.key for block in blocks]",
        test_primary.test_c14_an_offer_of_a_promised_block_takes_nothing_from_its_use,
    ),
    # -- admission
    _m(
        "a tier is given what was offered too seldom",
        "coordinator.cascades:Cascades._admit",
        "threshold > 1",
        "False",
        test_admission.test_c15_a_tier_has_a_threshold_of_its_own,
    ),
    _m(
        "what a tier declined counts as stored",
        "coordinator.cascades:Cascades.finish",
        "[key for key in job.keys if key not in bad]",
        "list(job.keys)",
        test_admission.test_c15_a_tier_may_decline_blocks_without_a_fault,
    ),
    _m(
        "a block is admitted one offer late",
        "coordinator.admission:Admission.is_admitted",
        "self._offers.get(key, 0) >= threshold",
        "self._offers.get(key, 0) > threshold",
    ),
    _m(
        "one offer too few is enough",
        "coordinator.admission:Admission.is_admitted",
        "self._offers.get(key, 0) >= threshold",
        "self._offers.get(key, 0) >= threshold - 1",
    ),
    _m(
        "a request's offers of one key count each",
        "coordinator.admission:Admission.offer",
        "counted.update(fresh)",
        "",
    ),
    _m(
        "a tier with a threshold gets every block",
        "coordinator.cascades:Cascades._takes_all",
        "tier.store_threshold <= 1",
        "True",
        test_admission.test_c15_a_tier_has_a_threshold_of_its_own,
    ),
)


def kill(mutant: Mutant) -> str | None:
    """What sees *mutant*, in words; ``None`` when nothing does."""
    with changed(mutant.place, mutant.old, mutant.new):
        if mutant.killer is not None:
            function = mutant.killer.func if isinstance(mutant.killer, partial) else mutant.killer
            return _seen_by(function.__name__, mutant.killer)
        for seed in range(SEEDS):
            seen = _seen_by(f"the simulator, seed {seed}", Simulation(seed).run, STEPS)
            if seen is not None:
                return seen
    return None


def _seen_by(name: str, function: Callable[..., object], *arguments: object) -> str | None:
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - however a test fails, it has seen the mutant
        return f"{name}: {type(error).__name__}"
    return None


def main() -> int:
    """Kill all mutants and say how. Exit status 1 when one survives."""
    survivors = 0
    for mutant in MUTANTS:
        seen = kill(mutant)
        survivors += seen is None
        sys.stdout.write(f"{'SURVIVES' if seen is None else 'killed':9} {mutant.name} ({seen})\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(MUTANTS)} mutants, {survivors} survive\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
