"""The model: from token ids and KV slots to the next token of every sequence.

May import: `mem_cache`, `kvferry`, torch, numba and its llvmlite. Never `kv_transfer`, a role, Ray.

Reading order. The loop: `request` (a sequence and its stages), `admission` (who may take KV),
`holding` (KV that goes back and gives way), `scheduler` (what the next step computes) with
`itl_limit` and `step_cost` (how much of prompts), `engine` (the step), `step_loop` (the thread),
`kv_event_feed` (what others are told). The model:
`model_directory` (which model), `model_spec` (its shape), `layer_spec` and `model_families` (what
its layers consist of), `forward_batch` (what one step computes), `attention.metadata` (where its KV
lies), `decoder` (the computation) over `decoder_layer`, `mlp` and `projection`, `lora` (what
adapters add) over `lora_weights` and `lora_config`, `tensor_parallel` and `tensor_parallel_group`
(several ranks of it), `model_runner` (the one object the step calls), `cuda_model_runner` (the same
on a GPU) over `cuda_graphs` and `cuda_device`, `crew` (threads that share the work of a step),
`native_math`, `native_memory` and `instructions` (what kernels are made of), `constraint` (what a
grammar lets come next), `sampler` (the choice of the token) over `drawing` and `ranking`.
"""
