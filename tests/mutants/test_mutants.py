"""Every mutant must be noticed by the check it names, within a bounded and repeatable run."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from quire.errors import QuireError
from quire.kernels.backend import AttentionBackend
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.plan import planner
from quire.spec.bundled import BUNDLED_MODELS, DEFAULT_MODEL
from tests import mutants as shipped
from tests import waits
from tests.bench import test_sequential
from tests.cache import test_page_owners, test_path_ends
from tests.cache.test_auditor import check_frames_that_move
from tests.cache.test_hold import check_holds
from tests.canary.machine import run_canary
from tests.canary.test_budget import check_short_steps
from tests.canary.test_chain import check_chains
from tests.changes import ROOT, changed
from tests.connectors import test_checked_store
from tests.engine import (
    drafted,
    grammars,
    test_channel,
    test_continued,
    test_cuda_memory,
    test_draft_head,
    test_draft_trees,
    test_fake_cuda,
    test_filters,
    test_frame_staging,
    test_grammar,
    test_graphs,
    test_hisparse,
    test_mtp,
    test_page_tables,
    test_prompt_logprobs,
    test_token_counts,
    test_transfer,
    test_transfer_faults,
    test_upload,
    test_warm_up,
    test_watchdog,
    tiered,
)
from tests.engine.test_draft_model import check_drafts_for_itself, check_pages_are_complete, tiny_target, undrafted
from tests.engine.test_rejection import CASES, check_a_draw
from tests.fuzz.run import run_lives
from tests.kernels.bounds_case import check_bounds
from tests.kernels.native.native_case import check_narrow, check_native
from tests.kernels.native.test_draws import check_draws
from tests.kernels.native.test_products import check_pairs, check_products
from tests.kernels.steps_case import check_steps
from tests.kernels.stored_case import FORMATS, check_stored
from tests.kernels.triton import test_fixed_plans, test_moves
from tests.kernels.triton.test_write import check_write as check_triton_write
from tests.kernels.triton.triton_case import check_step as check_triton
from tests.memory import test_pinned
from tests.memory.arena_machine import run_arena
from tests.memory.machine import run_allocator
from tests.memory.mamba_machine import run_mamba
from tests.memory.resized_machine import run_resized
from tests.memory.swa_machine import run_swa
from tests.memory.test_idle_frames import check_idle_order
from tests.models import test_native_decoder, test_packing, test_rotary
from tests.models.test_draft_head import check_head_in_one_call
from tests.models.test_rotary import check_angles
from tests.mutants import (
    arena_mutants,
    bounds_mutants,
    canary_mutants,
    chunk_mutants,
    connector_mutants,
    cuda_memory_mutants,
    device_mutants,
    draft_mutants,
    eviction_mutants,
    explanation_mutants,
    forward_mutants,
    grammar_mutants,
    graph_mutants,
    hisparse_mutants,
    hold_mutants,
    hot_slot_mutants,
    hybrid_mutants,
    journal_mutants,
    launch_mutants,
    liveness_mutants,
    native_mutants,
    output_mutants,
    peer_mutants,
    prompt_mutants,
    resized_mutants,
    router_mutants,
    security_mutants,
    session_mutants,
    speculation_mutants,
    staging_mutants,
    step_mutants,
    tenant_mutants,
    tile_mutants,
    transfer_mutants,
    triton_mutants,
)
from tests.mutants.chosen import files_of, is_chosen
from tests.mutants.mutants import MUTANTS, Mutant
from tests.observe import test_histogram
from tests.offload import test_prefetch, test_tiering, test_worth_loading
from tests.offload.test_never_slower import check_link
from tests.offload.test_worth_loading import LOOKS
from tests.plan.check import check_plan
from tests.prefix import test_ended
from tests.prefix.test_evict import check_eviction_orders
from tests.prefix.test_hit_density import DENSITY
from tests.prefix.test_policy_models import KEYS, check_policy
from tests.prefix.test_stay_table import TABLE
from tests.routing import test_relay
from tests.routing.test_page_index import check_index
from tests.scheduler import test_chunk_budget, test_sessions, test_tenant_rooms, test_tenants
from tests.scheduler.session_machine import run_sessions
from tests.scheduler.step_machine import run_steps
from tests.scheduler.tenant_machine import run_tenants
from tests.scheduler.test_hybrid_reuse import (
    check_one_state,
    check_shared_prefixes,
    test_checkpoints_never_take_the_place_of_a_request,
    test_the_second_request_that_shares_a_prefix_leaves_a_state_where_they_part,
    test_windows_go_before_pages_and_come_back,
)
from tests.serve import (
    test_async_engine,
    test_connections,
    test_late_death,
    test_output,
    test_restart,
    test_shares,
    test_tokenising,
)
from tests.serve.test_tenants import check_all_keys_are_compared
from tests.sim import test_arena
from tests.sim.arenas import run_arena_replay
from tests.sim.resized import run_resized_replay
from tests.sim.test_hit_bounds import check_optimum, test_of_a_prompt_the_last_token_is_computed
from tests.sim.test_replicas import check_events
from tests.sparse.test_hot_slots import check_hot_slots
from tests.speculative import compared_drafters, test_ngram, test_verify
from tests.tiers import test_lanes
from tests.tiers.stores import test_directory
from tests.tiers.stores.test_directory_foreign import by_hard_link, by_symbolic_link, check_a_slab_is_not_followed
from tests.transfer import test_control, test_handshake, test_receiving
from tests.transfer.protocol_model import explore
from tests.transfer.test_protocol import SMALL

NOTICED = (AssertionError, QuireError, pytest.fail.Exception)
"""What a check raises. A mutant that ends in another error has only become invalid code."""


def in_folder(run: Callable[[Path], None]) -> None:
    with TemporaryDirectory() as folder:
        run(Path(folder))


def with_patches(run: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patches:
        run(patches)


def bundled_tokenizer() -> Tokenizer:
    return load_tokenizer(str(BUNDLED_MODELS[DEFAULT_MODEL]))


REUSE: tuple[Callable[[], object], ...] = (
    test_checkpoints_never_take_the_place_of_a_request,
    test_the_second_request_that_shares_a_prefix_leaves_a_state_where_they_part,
    test_windows_go_before_pages_and_come_back,
    lambda: check_one_state("state"),
    lambda: check_shared_prefixes("window and state", 16, 48),
)
SESSIONS: tuple[Callable[[], object], ...] = (
    lambda: test_sessions.test_a_turn_computes_its_new_tokens_and_no_other("state", overlap=True, share_prefixes=True),
    lambda: test_sessions.test_an_edit_before_begins_on_the_cached_prefix("state", 36),
    test_sessions.test_an_edit_in_the_last_page_goes_on_where_it_differs,
    test_sessions.test_another_tenant_has_other_sessions,
    test_sessions.test_another_owner_has_other_sessions_of_a_namespace,
    test_sessions.test_a_key_that_holds_most_gives_way_first,
    test_sessions.test_the_budget_ends_the_session_that_was_not_used_for_the_longest_time,
    test_sessions.test_sessions_give_way_before_a_request_is_preempted_or_waits,
    lambda: test_sessions.test_a_flush_ends_sessions_and_what_runs_is_not_held(share_prefixes=True),
    test_sessions.test_a_session_is_closed,
    *(lambda seed=seed: run_sessions(seed, 60) for seed in range(30)),
)
TENANTS: tuple[Callable[[], object], ...] = (
    test_tenants.test_what_lies_within_a_floor_stays,
    test_tenants.test_a_floor_is_lent_to_what_is_cached,
    test_tenants.test_running_requests_of_others_take_nothing_of_a_floor,
    test_tenants.test_a_full_tenant_blocks_no_other,
    test_tenants.test_a_small_request_does_not_pass_a_large_one_of_its_tenant,
    test_tenants.test_what_can_never_run_is_refused_at_once,
    test_tenants.test_a_large_request_is_passed_within_floors_only,
    test_tenants.test_no_request_within_a_floor_is_preempted,
    lambda: test_tenants.test_turns_are_by_weight((3.0, 1.0)),
    test_tenants.test_who_was_away_has_saved_nothing,
    test_tenants.test_retentions_and_sessions_within_a_floor_stay,
    test_tenants.test_checkpoints_within_a_floor_stay,
    test_tenants.test_what_has_most_above_its_floor_goes_first,
    *(lambda seed=seed: run_tenants(seed, 60) for seed in range(40)),
)
DRAFTED = ("none", "alternating", "all right")
RUNS: dict[str, Iterable[Callable[[], object]]] = {
    "allocators": [lambda seed=seed: run_allocator(seed, 60) for seed in range(20)],
    "windows": [lambda seed=seed: run_swa(seed, 60) for seed in range(20)],
    "states": [lambda seed=seed: run_mamba(seed, 60) for seed in range(20)],
    "resized": [lambda seed=seed: run_resized(seed, 60) for seed in range(80)],
    "arena": [lambda seed=seed: run_arena(seed, 60) for seed in range(60)],
    "arenas": [lambda seed=seed: run_arena_replay(seed, shakes=True, tiers=seed % 2 < 1) for seed in range(30)],
    "arenas with drafts": [lambda seed=seed: run_arena_replay(seed, shakes=True, drafts=True) for seed in range(30)],
    "resizes": [lambda seed=seed: run_resized_replay(seed, tiers=seed % 2 < 1) for seed in range(30)],
    "mapped memory": [lambda seed=seed: test_cuda_memory.check_sizes_of(seed) for seed in range(10)],
    "resized arenas": [lambda seed=seed: run_resized_replay(seed, arena=True) for seed in range(20)],
    "moved tables": [test_arena.check_tables],
    "path ends": [test_path_ends.check_orders],
    "path ends of tenants": [lambda: test_path_ends.check_orders(("one", "two"))],
    "spared": [test_path_ends.check_spared],
    "policies": [check_eviction_orders],
    "orders": [lambda name=name: check_policy(name, 0) for name in KEYS],
    "density": DENSITY,
    "stay table": TABLE,
    "ended sessions": [
        *(lambda name=name: test_ended.check_what_is_its_own_goes_first(name) for name in ("lru", "density")),
        test_ended.check_a_use_takes_it_back,
        test_ended.check_a_turn_that_still_runs,
        test_ended.check_evicted_pages_know_their_users,
        lambda: test_ended.check_lower_tiers("lru"),
        test_sessions.check_a_closed_session_goes_first,
        test_sessions.check_an_expired_session_is_closed,
    ],
    "copies below": [
        lambda: test_ended.check_lower_tiers("density"),
        lambda: test_ended.check_worth_below("density", ["cd", "mn", "ef", "ab"]),
    ],
    "page replays": [
        lambda: test_sequential.check_small_pool(5),
        lambda: test_sequential.check_small_pool(9),
        test_of_a_prompt_the_last_token_is_computed,
        test_sequential.test_the_pool_is_never_exceeded_and_every_page_is_evictable_at_the_end,
    ],
    "optimum": [lambda seed=seed: check_optimum(seed) for seed in range(20)],
    "idle": [check_idle_order],
    "reuse": REUSE,
    "stored": [lambda seed=seed: check_stored(seed) for seed in range(2 * len(FORMATS))],
    "bounds": [lambda seed=seed: check_bounds(seed) for seed in range(20)],
    "native bfloat16": [lambda seed=seed: check_narrow(seed) for seed in range(10)],
    "native": [lambda seed=seed: check_native(seed) for seed in range(12)],
    "native layers": [
        lambda: test_native_decoder.test_one_call_is_layer_by_layer("qwen2_sliding", torch.float32),
        test_native_decoder.check_tree,
        test_native_decoder.check_kept_layers,
        lambda: in_folder(lambda folder: check_head_in_one_call("eagle", torch.float32, folder)),
    ],
    "angles": [
        lambda: with_patches(lambda patch: check_angles("llama_gqa", torch.float32, patch)),
        lambda: with_patches(test_rotary.test_few_positions_are_kept_of_a_long_context),
        lambda: test_rotary.test_angles_of_a_batch_are_not_kept(50),
    ],
    "layers in one call": [
        test_native_decoder.check_pools,
        test_native_decoder.check_new_weights,
        test_native_decoder.check_that_a_difference_shows,
    ],
    "native products": [lambda shape=shape: check_products(torch.float32, *shape) for shape in ((70, 100), (256, 512))],
    "native tiles": [check_pairs],
    "penalties": [
        test_token_counts.test_penalties_from_step_to_step_are_those_of_a_new_sampler,
        lambda: test_token_counts.check_counts([1, 2, 1, 1, 0, 2], [1, 2, 3, 4, 5, 2, 6]),
    ],
    "native draws": [lambda seed=seed: check_draws(seed, 500) for seed in range(40)],
    "triton": [lambda seed=seed: check_triton(seed) for seed in range(12)],
    "row functions": [
        lambda case=case: test_packing.test_native_functions_round_as_torch_does(*case)
        for case in ((torch.float32, 5), (torch.bfloat16, 300))
    ],
    "packing": [
        test_packing.test_parts_of_one_product_follow_their_input,
        test_packing.test_layers_that_share_an_input_are_one_product,
        lambda: test_packing.test_fused_layers_equal_the_plain_model("biases", native=True),
        lambda: test_packing.test_a_product_that_differs_stays_plain("order"),
        lambda: test_packing.test_the_plain_weight_is_freed(tied=True),
        lambda: test_packing.test_new_weights_are_computed_with_at_once_and_packed_again(tied=False),
        test_packing.test_an_embedding_changed_alone_is_packed_again,
        test_packing.test_products_have_few_numbers_of_rows,
    ],
    "fused layers": [
        lambda: test_packing.test_fused_layers_equal_the_plain_model("qwen3", native=True),
        lambda: test_packing.test_layers_with_another_formula_keep_their_own_code("gelu"),
        test_packing.test_another_scale_of_logits_keeps_the_code_around_the_layers,
        test_packing.test_captured_layers_are_kept_of_a_fused_model,
    ],
    "triton writes": [
        lambda name=name: check_triton_write(name, torch.float32) for name in FORMATS if name != "bfloat16"
    ],
    "table entries": [lambda count=count: test_page_tables.check_entries(count) for count in (1, 700)],
    "moves": [
        *(lambda seed=seed: test_moves.check_moves(seed) for seed in range(2 * len(test_moves.SHAPES))),
        test_moves.test_words_are_as_wide_as_sizes_allow,
    ],
    "moved states": [
        lambda case=case: test_moves.check_states(*case)
        for case in (((2, 3, 5), torch.float32, None), ((4, 700), torch.float16, torch.float32))
    ],
    "swapped entries": [lambda seed=seed: test_moves.check_swap_in(seed) for seed in range(5)],
    "page tables": [
        lambda seed=seed: test_page_tables.check_tables("cpu", test_page_tables.moves_of("cpu", "apart"), 1000, seed)
        for seed in (3, 4)
    ],
    "holds": [check_holds],
    "page index": [lambda seed=seed: check_index(seed) for seed in range(5)],
    "index of caches": [lambda: check_events(restart_every=0.4, event_delay=0.2)],
    "sessions": SESSIONS,
    "tenants": TENANTS,
    "tenant rooms": [
        *(lambda case=case: test_tenant_rooms.check_room(*case) for case in test_tenant_rooms.ROOMS),
        *(lambda case=case: test_tenant_rooms.check_ceiling(*case) for case in test_tenant_rooms.CEILINGS),
        *(lambda case=case: test_tenant_rooms.check_floor(*case) for case in test_tenant_rooms.FLOORS),
        test_tenant_rooms.test_what_frames_that_cannot_move_keep_from_an_arena_is_made_up_for_below_floors,
        test_tenant_rooms.test_page_ids_of_an_arena_have_floors,
        test_tenant_rooms.test_floors_of_all_memory_leave_out_what_is_set_apart,
        lambda: run_tenants(62, 80),  # met a checkpoint within the floor of another
    ],
    "page owners": [lambda seed=seed: test_page_owners.test_counts_follow_each_change(seed) for seed in range(10)],
    "hot slots": [lambda seed=seed: check_hot_slots(seed) for seed in range(20)],
    "tiles": [lambda seed=seed: check_steps(seed, AttentionBackend("torch")) for seed in range(20)],
    "links": [lambda seed=seed: check_link(seed) for seed in range(12)],
    "looks": [
        lambda look=look: test_worth_loading.test_looking_turns_nothing_off_and_nothing_on(look) for look in LOOKS
    ],
    "empty stores": [lambda: test_prefetch.test_a_store_that_brings_nothing_is_left_alone_and_found_again("RETRY")],
    "steps": [lambda seed=seed: run_steps(seed, 150) for seed in range(60)],
    "grammars": [
        lambda: grammars.check_same(turns=1, overlap=True),
        lambda: grammars.check_same(turns=1, speculative_config=grammars.CHAIN),
    ],
    "slow grammars": [lambda: test_grammar.check_a_slow_grammar(None)],
    "reserves": [lambda size=size: drafted.check_reserves(size) for size in (1, 4)],
    "rows": [lambda size=size: drafted.check_the_context_end(size, drafted.TREE) for size in (1, 4)],
    "drafts": [lambda script=script: drafted.check_tokens(script, drafted.greedy(24)) for script in DRAFTED],
    "draws": [
        lambda: drafted.check_tokens("all right", drafted.PENALTIES),
        drafted.check_min_tokens,
        drafted.check_stop_inside,
        lambda: drafted.check_log_probabilities(drafted.CHAIN),
    ],
    "rejection": [lambda params=params: check_a_draw(params) for params in CASES],
    "trees": [
        lambda: drafted.check_tokens("wrong in the third", drafted.greedy(24), drafted.TREE),
        lambda: drafted.check_log_probabilities(drafted.TREE),
    ],
    "states of drafts": [drafted.check_a_full_batch_of_states, drafted.check_states],
    "n-grams": [
        test_ngram.test_a_namespace_finds_its_own,
        test_ngram.test_a_flush_deletes_what_its_namespace_had,
        drafted.check_flush,
    ],
    "native n-grams": [lambda seed=seed: compared_drafters.check_a_life(seed) for seed in range(24)],
    "governor": [
        test_verify.test_drafts_that_are_never_right_are_left_out,
        test_verify.test_searches_that_find_nothing_are_left_out,
    ],
    "lanes": [
        test_lanes.test_a_slow_virtual_store_keeps_its_frames_behind_the_deadline,
        test_lanes.test_a_hung_store_holds_its_own_threads_only,
    ],
    "planner": [lambda seed=seed: check_plan(seed) for seed in range(300)],
    "draft models": [
        lambda: check_drafts_for_itself(tiny_target(), 16, "greedy"),
        lambda: check_pages_are_complete(tiny_target(), 4),
    ],
    "draft trees": [lambda kind=kind: test_draft_trees.check_trees(kind) for kind in ("eagle", "draft_model")],
    "best first": [
        lambda case=case: test_verify.test_trees_grow_best_first(*case) for case in ((2, 4, 6), (3, 3, 9), (4, 3, 40))
    ],
    "draft heads": [lambda: test_draft_head.check_heads(4)],
    "prediction layers": [lambda: test_mtp.check_drafts("glm4_moe")],
    "transfers": [lambda bounds=bounds: explore(bounds) for bounds in SMALL.values()],
    "transfer parts": [
        test_receiving.test_an_ask_and_its_part,
        test_receiving.test_a_stranger_ends_no_part,
    ],
    "transfer peers": [
        test_handshake.test_two_engines_that_fit,
        lambda: test_handshake.test_each_field_of_the_identity_is_refused_by_its_name("weights_epoch", 1),
        lambda: test_handshake.test_each_field_of_the_identity_is_refused_by_its_name(
            "layouts", {"full": "f" * 64, "window": "d" * 64}
        ),
        test_handshake.test_an_acceptor_without_the_secret_learns_nothing,
        test_control.test_the_same_peer_on_a_second_connection_has_lost_the_first,
    ],
    "spoiled pages": [test_transfer_faults.check_swapped_pages],
    "late writes": [test_transfer_faults.check_late_writes],
    "weights": [test_transfer_faults.check_new_weights],
    "cuts": [test_transfer_faults.check_cuts],
    "explanations": [
        test_tiering.test_each_token_that_is_reused_says_from_which_tier,
        test_tiering.test_who_needs_room_on_the_host_is_named,
    ],
    "quantiles": [test_histogram.test_a_quantile_is_in_the_bucket_of_the_value_there],
    "held frames": [
        test_transfer_faults.test_a_peer_that_never_answers_holds_host_frames_and_no_cached_page,
    ],
    "silence": [test_transfer_faults.test_a_peer_that_cannot_be_reached_is_waited_for_no_longer],
    "removals": [test_transfer_faults.test_a_removed_peer_delays_no_request_and_keeps_its_frames_until_its_last_write],
    "aborts": [test_transfer_faults.test_an_aborted_request_is_aborted_at_the_peer_too],
    "new weights": [test_transfer_faults.test_new_weights_refuse_what_was_asked_before],
    "salts": [test_transfer_faults.test_a_salt_too_long_for_messages_is_computed_here],
    "wrong wants": [test_transfer_faults.test_a_want_of_pages_that_the_prompt_lacks_is_refused],
    "chains": [test_transfer.test_a_prompt_that_a_peer_asks_for_is_computed_here],
    "hot buffers": [lambda kind=kind: test_hisparse.check_buffers(kind, 4) for kind in ("glm_moe_dsa", "deepseek_v32")],
    "chunks": [
        lambda: test_chunk_budget.check_law(test_chunk_budget.CPU, 64),
        test_chunk_budget.check_target,
        lambda: test_chunk_budget.check_target(1.0),
    ],
    "texts": [
        lambda name=name: test_output.test_real_tokenizers_stream_the_text_of_all_tokens(name)
        for name in test_output.TOKENIZERS
    ],
    "uploads": [lambda seed=seed: test_upload.check_upload(seed) for seed in range(3)],
    "readbacks": [test_fake_cuda.check_readback],
    "device sampling": [test_fake_cuda.check_sampling, test_fake_cuda.check_flat],
    "filters by counting": [lambda seed=seed: test_filters.check_counting(seed) for seed in range(3)],
    "copies of steps": [test_fake_cuda.check_copies],
    "staging": [
        test_frame_staging.check_marks,
        test_frame_staging.check_loads,
        test_frame_staging.check_queueing,
        test_frame_staging.check_moves,
        test_frame_staging.check_tiers,
        lambda: test_frame_staging.check_tiers(canary="all"),
    ],
    "pinned": [test_pinned.check_slices, test_pinned.check_copies],
    "graphs": [test_graphs.check_small, test_graphs.check_copies],
    "graphs of other weights": [test_graphs.check_weights],
    "warm-up": [lambda: test_warm_up.check_compilations("llama_gqa", disable_cuda_graph=True)],
    "plans of fixed sizes": [test_fixed_plans.check_nested],
    "canary": [
        lambda seed=seed, how=how: run_canary(seed, 120, everything=how[0], late=how[1])
        for seed in range(20)
        for how in ((True, 0), (False, 0), (False, 3))
    ],
    "audits": [check_frames_that_move],
    "canary budget": [check_short_steps],
    "canary chains": [check_chains],
    "channels": [test_channel.check_messages],
    "checked store": [test_checked_store.check_store],
    "files that fail": [lambda: in_folder(lambda path: test_directory.check_passing(path, errno.EMFILE))],
    "continued": [test_continued.check_tiny],
    "relayed": [test_relay.check_a_kill],
    "readers": [test_async_engine.check_a_slow_reader],
    "foreign files": [
        lambda plant=plant: in_folder(lambda path: check_a_slab_is_not_followed(path, plant))
        for plant in (by_symbolic_link, by_hard_link)
    ],
    "prompts": [test_prompt_logprobs.check_small],
    "keys": [lambda: with_patches(check_all_keys_are_compared)],
    "stop strings": [
        lambda: test_output.check_stop_strings("aabc", ["aab", "ab"], include=False),
        lambda: test_output.check_stop_strings("xaabcab", ["abd", "abca"], include=True),
        lambda: test_output.check_stop_strings("aaab", ["aaaa", "aab", "b"], include=False),
        test_output.check_the_same_stop_strings_have_one_automaton,
    ],
    "long texts": [test_tokenising.check_a_long_text_is_refused_unread],
    "departed clients": [lambda: test_tokenising.check_a_client_that_leaves_ends_the_work(bundled_tokenizer())],
    "tokenising queues": [test_tokenising.check_threads_are_few_and_the_queue_bounded],
    "turns": [test_shares.check_a_long_queue_delays_its_own_client],
    "shares": [test_shares.check_a_client_keeps_no_other_out],
    "rates": [test_shares.check_retry_after_is_the_measured_rate],
    "queues": [test_shares.check_retry_after_follows_the_queue],
    "times to come again": [lambda: with_patches(test_restart.check_the_time_to_come_again_gets_shorter)],
    "deaths": [test_restart.check_health_knows_a_death_at_once],
    "late deaths": [lambda: with_patches(test_late_death.check_a_start_that_dies_late_starts_no_other)],
    "restarts": [test_restart.check_restarts_are_limited],
    "silent engines": [test_restart.check_a_silent_engine_fails_health],
    "watchdogs": [test_watchdog.check_a_stuck_thread_is_told],
    "stuck lanes": [test_watchdog.check_lanes],
    "slow requests": [test_connections.check_a_slow_body],
    "served": [test_transfer_faults.test_peers_are_served_between_steps],
}


FIRST_SEEDS = {
    "a-chunk-is-taken-for-resident": 33,
    "a-duplicate-state-replaces-the-first": 19,
    "a-failed-allocation-keeps-what-it-has": 7,
    "a-failed-load-frees-its-frames-twice": 13,
    "a-failed-store-is-visible": 9,
    "a-frame-moves-and-stays": 3,
    "a-hit-outlives-its-window": 10,
    "a-load-is-ready-before-its-check": 13,
    "a-page-id-is-allocated-while-its-record-is-read": 70,
    "a-page-is-stored-without-the-one-before": 23,
    "a-prefetch-keeps-its-frames-for-ever": 21,
    "a-rejection-is-counted-a-step-late": 5,
    "a-revived-frame-is-freed-with-its-old-page": 3,
    "a-window-is-a-page-too-short": 5,
    "a-window-is-not-revived": 3,
    "a-window-with-a-hole-is-resumed-on": 11,
    "an-arriving-page-is-there": 13,
    "chunks-are-not-cut-to-the-window-pool": 7,
    "copies-of-leased-paths-are-evicted": 15,
    "damage-is-not-counted": 3,
    "evict-before-refusing": 3,
    "fetches-are-not-checked": 33,
    "latents-are-the-anchor": 9,
    "loads-are-not-checked": 13,
    "more-room-is-asked-for-than-was-promised": 4,
    "pages-are-cached-behind-damaged-ones": 152,
    "part-of-a-page-is-stored": 9,
    "preempt-the-first": 6,
    "preemption-makes-output-prompt": 6,
    "records-in-place-are-not-checked": 31,
    "records-in-place-are-not-sealed": 9,
    "removed-on-the-first-of-two-copies": 3,
    "storage-is-asked-behind-cached-pages-only": 5223,
    "the-end-of-a-record-is-not-covered": 37,
    "what-a-cached-page-lacks-is-its-neighbours": 33,
    "what-a-full-link-refused-is-not-stored": 648,
    "what-is-below-is-not-loaded": 3,
}
"""Of mutants that few lives meet: begin with one that has met it, which saves seconds while the code stays."""


@pytest.fixture(autouse=True)
def _no_groups_of_other_mutants() -> Iterator[None]:
    """The planner remembers groups of models, and tests what models generate; those of a mutant must not be met by the
    next."""
    planner._groups.cache_clear()
    undrafted.cache_clear()
    tiered.case_of.cache_clear()
    yield
    planner._groups.cache_clear()
    undrafted.cache_clear()
    tiered.case_of.cache_clear()


def noticed(killer: str) -> bool:
    for run in RUNS[killer]:
        try:
            run()
        except NOTICED:
            return True
    return False


LONG = (
    *("aborts", "draft heads", "draft models", "draft trees", "graphs", "held frames", "links", "native"),
    *(
        "native bfloat16",
        "native draws",
        "native layers",
        "native products",
        "prediction layers",
        "row functions",
        "silence",
        "spoiled pages",
        "triton",
    ),
)
"""What these run takes seconds for each mutant."""


FUZZING = "tests/fuzz/"


def concerned(mutant: Mutant | shipped.Mutant) -> set[str]:
    """Files of what a mutant patches, and of the check that must notice it."""
    checks = RUNS[mutant.killer] if isinstance(mutant, Mutant) else ()
    return files_of(mutant.apply, *checks) - {Path(__file__).relative_to(ROOT).as_posix()}


def case_of(mutant: Mutant | shipped.Mutant) -> Any:
    """The parameter of a test, slow if this commit does not run it."""
    is_long = isinstance(mutant, Mutant) and mutant.killer in LONG
    fuzzed = not isinstance(mutant, Mutant) and any(file.startswith(FUZZING) for file in changed())
    quick = not is_long and (fuzzed or is_chosen(mutant.name, concerned(mutant)))
    return pytest.param(mutant, id=mutant.name, marks=() if quick else pytest.mark.slow)


@pytest.mark.timeout(100)  # also notices a mutant that hangs a check, by `pytest.fail`
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mutant", [case_of(mutant) for mutant in MUTANTS])
def test_every_mutant_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "SOON_S", 3.0)  # what a mutant keeps from happening is waited for
    if mutant.killer == "grammars":
        grammars.expected()  # is kept: under a mutant it could be wrong in the same way
    mutant.apply(monkeypatch)
    assert noticed(mutant.killer), f"no check noticed that {mutant.wrong}"
    gc.collect()  # what the failed check left open ends here, not in another test


@pytest.mark.parametrize("mutant", [case_of(mutant) for mutant in shipped.MUTANTS.values()])
def test_fuzzing_meets_every_mutant_that_is_shipped(mutant: shipped.Mutant) -> None:
    name = mutant.name
    violation = run_lives("both", count(FIRST_SEEDS.get(name, 0)).__next__, operations=60_000, inject=name).violation
    assert violation is not None, f"no check noticed: {mutant.wrong}"
    assert violation.by_check, f"the mutant is invalid code: {violation.message}"


@pytest.mark.slow
@pytest.mark.parametrize("killer", RUNS)
def test_without_a_mutant_all_is_well(killer: str) -> None:
    for run in list(RUNS[killer])[:5]:
        run()


def test_names_and_sentences_are_all_different() -> None:
    known = (
        chunk_mutants.prompts_starve_beside_decodes,
        hybrid_mutants.windows_go_tail_first,
        tile_mutants.padding_is_read_from_nowhere,
        step_mutants.draws_are_one_too_early,
        hold_mutants.held_frames_are_idle,
        session_mutants.flushed_rows_stay,
        eviction_mutants.greedy_dual_never_ages,
        hot_slot_mutants.tails_are_not_padding,
        staging_mutants.steps_do_not_follow_loads,
        device_mutants.filters_branch_on_the_device,
        draft_mutants.the_last_accepted_draft_is_not_computed,
        speculation_mutants.the_first_draft_is_not_verified,
        transfer_mutants.a_late_writer_meets_reused_pages,
        peer_mutants.tags_are_never_shut,
        prompt_mutants.what_is_cached_is_not_computed,
        grammar_mutants.masks_are_of_other_rows,
        arena_mutants.a_previous_frame_is_not_told,
        tenant_mutants.whole_leaves_go,
        resized_mutants.clear_takes_all,
        cuda_memory_mutants.mapped_again_with_old_bytes,
        bounds_mutants.bounds_outlive_their_page,
        native_mutants.a_chunk_sees_its_next_token,
        forward_mutants.a_part_is_stale,
        hisparse_mutants.padding_is_read,
        output_mutants.words_are_decoded_alone,
        triton_mutants.a_row_sees_the_token_after_it,
        graph_mutants.inputs_are_those_of_the_capture,
        journal_mutants.outputs_of_another_engine_are_a_prompt,
        launch_mutants.long_contexts_are_not_warmed_up,
        canary_mutants.damaged_frames_are_free_again,
        security_mutants.links_are_followed,
        liveness_mutants.the_first_has_it_all,
        router_mutants.a_restart_is_waited_for,
        connector_mutants.the_digest_is_not_compared,
        explanation_mutants.the_host_names_no_request,
    )
    assert {mutant.__name__ for mutant in known} <= {mutant.name for mutant in MUTANTS}
    assert FIRST_SEEDS.keys() <= shipped.MUTANTS.keys()
    every = [*MUTANTS, *shipped.MUTANTS.values()]
    assert len({mutant.name for mutant in every}) == len({mutant.wrong for mutant in every}) == len(every)
    assert {mutant.killer for mutant in MUTANTS} == set(RUNS) >= set(LONG)
