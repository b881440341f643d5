"""scheduler.yaml: the plan as the values the runtime schedules by, rendered from templates/scheduler.yaml.j2.

This module knows the keys and where each value came from; it does not know how the runtime uses them.

The file is one mapping, `runtime:`, with exactly these keys (edgert.config reads them strictly):

    key                          type           meaning
    enable_chunked_prefill       bool           false: a prompt's chunks run back to back, nothing decodes between them
    max_prefill_chunk_size       int            largest chunk used; one of graph_bucket_sizes
    prefill_decode_ratio         str "1:N"      decode steps after each prefill chunk while both wait, N within ratio_range
    prefill_decode_ratio_range   [int, int]     N follows the backlog between these two; equal bounds fix it
    enable_cuda_graph            bool           false: every cell runs eager (no effect on the onnxruntime backend)
    graph_bucket_sizes           list[int]      prefill chunk sizes, ascending; a subset of the artifact's prefill cells
    graph_batch_sizes            list[int]      decode batch sizes, ascending; a subset of the artifact's decode cells
    kv_tiers                     list[int]      decode KV tiers, ascending; a subset of the artifact's; the last serves context_tokens
    enable_mtp                   bool           false: draft length 0
    mtp_num_heads                int            draft length k (0 = none), at most the artifact's draft length
    mtp_acceptance_threshold     float 0..1     drafting stops where measured acceptance falls below this
    slots                        int            sequences held at once, at most the artifact's slots
    context_tokens               int            prompt + output tokens of one sequence, at most the artifact's
    queue_limit                  int            requests waiting beyond the slots before a new one is refused
    warm_up                      bool           run (capture) every cell once before ready is reported
    check_golden_at_load         bool           compare with golden.json before ready is reported
    memory_margin_fraction       float 0..0.5   share of device memory left to the system
    memory_headroom_bytes        int            bytes the ledger left free; a load that sees less available than it needs stops
"""

from __future__ import annotations
