"""What FlashInfer's documentation says of its two wrappers for paged KV, computed in PyTorch.

The signatures are those of flashinfer-python 0.7.2.post1 (`tests/model/cuda/test_flashinfer.py` compares them
with the package's where it is installed).  What Baton gives is computed with; of all else only the default is
taken.  What the package checks, and what would be wrong without a word, is checked too.  As with the
package, whatever `run` uses in a wrapper for graphs lies in its buffers, keys and values that are not seen
have the weight 0 (a NaN among them would be seen), and results of a plan stay valid until the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VERSION = "0.7.2.post1"
_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads a KV head for which there are kernels that do without products of matrices."""


def _are_defaults(**given: Any) -> None:
    for name, value in given.items():
        default = {
            "pos_encoding_mode": "NONE", "window_right": 0, "disable_split_kv": False,
            "use_fp16_qk_reduction": False, "token_pos_in_items_len": 0, "q_len_per_req": 1,
            "return_lse": False, "lse_base": "log2", "lse_layout": "NH", "variant_owns_mask": False,
        }.get(name)  # fmt: skip
        assert value == default, f"{name}={value!r}: the double does not compute it"


class _Paged:
    """What both share."""

    def _begin(self, workspace: Tensor, layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "HND"
        assert backend == "fa2"
        self.device, self.plans = workspace.device, 0
        self._heads = 0

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            assert buffer.dtype == torch.uint8
            assert buffer.device == self.device

    def _planned(
        self,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        sizes: tuple[int, int, int, int],
        window: int,
        cap: float | None,
        dtypes: tuple[Any, Any, Any],
        scale: float | None,
    ) -> None:
        """Lengths on the host, pages on the device, and all of them as they are said to be."""
        for one in (indptr, last):
            assert one.dtype == torch.int32
            assert one.device.type == "cpu", "a plan reads it on the host: it would wait for the device"
        assert indices.dtype == torch.int32
        assert indices.device == self.device, "it would be copied by a copy that waits"
        assert len(indptr) == len(last) + 1 > 1
        assert indptr[0] == 0
        assert int(indptr[-1]) == len(indices)
        heads, kv_heads, dim, size = sizes
        assert heads % kv_heads == 0
        pages = indptr.diff()
        assert bool((pages >= 1).all())
        assert bool((last >= 1).all())
        assert bool((last <= size).all())
        assert window >= -1
        q, kv, out = dtypes
        assert q == kv
        assert out is None
        self._heads, self._kv_heads, self._dim, self._size = sizes
        self._window, self._cap, self._dtype = window, cap or 0.0, q
        self._scale = dim**-0.5 if scale is None else scale
        self.plans += 1

    def _run(
        self, q: Tensor, paged_kv_cache: Any, counts: Tensor, causal: bool, out: Tensor | None
    ) -> Tensor:
        assert self._heads, "plan comes before run"
        keys, values = paged_kv_cache
        assert isinstance(paged_kv_cache, tuple)
        assert keys.stride() == values.stride(), "K/V strides differ"
        for pages in (keys, values):
            assert pages.shape[1:] == (self._kv_heads, self._size, self._dim)
            assert pages.dtype == self._dtype
            assert pages.device == self.device
            assert pages.stride(-1) == 1
        assert q.shape == (int(counts.sum()), self._heads, self._dim)
        assert q.dtype == self._dtype
        assert q.stride(-1) == 1
        assert out is not None
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        token = 0
        for row, count in enumerate(counts.tolist()):
            first, stop = self._indptr[row : row + 2].tolist()
            blocks = self._indices[first:stop].long()
            length = (stop - first - 1) * self._size + int(self._last[row])
            found = [pages[blocks].transpose(0, 1).flatten(1, 2).double().clone() for pages in (keys, values)]
            for one in found:  # the kernels fill what lies behind a row's end
                one[:, length:] = 0
            part = q[token : token + count].double().unflatten(1, (self._kv_heads, -1))
            scores = torch.einsum("qkgd,knd->kgqn", part, found[0]) * self._scale
            if self._cap:
                scores = self._cap * torch.tanh(scores / self._cap)
            at = torch.arange(count)[:, None] + (length - count)
            n = torch.arange(found[0].shape[1])[None]
            seen = n < length
            if causal:
                seen = seen & (n <= at)
            if self._window >= 0:
                seen = seen & (n >= at - self._window)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            result = torch.einsum("kgqn,knd->qkgd", weights, found[1])
            out[token : token + count] = result.flatten(1, 2).to(out.dtype)
            token += count
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        _are_defaults(jit_args=jit_args)
        self._begin(float_workspace_buffer, kv_layout, backend)
        self._matrices, self._fixed = use_tensor_cores, use_cuda_graph
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert all((buffer is not None) == use_cuda_graph for buffer in buffers)
        for buffer in buffers:
            if buffer is not None:
                assert buffer.dtype == torch.int32
                assert buffer.device == self.device
        self._indptr, self._indices, self._last = buffers  # type: ignore[assignment]

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        _are_defaults(
            pos_encoding_mode=pos_encoding_mode, window_right=window_right, data_type=data_type,
            rope_scale=rope_scale, rope_theta=rope_theta, block_tables=block_tables, seq_lens=seq_lens,
            fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
            q_len_per_req=q_len_per_req, is_causal=is_causal,
        )  # fmt: skip
        assert non_blocking
        assert self._matrices or num_qo_heads // num_kv_heads in _GROUPS
        self._planned(
            indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size),
            window_left, logits_soft_cap, (q_data_type, kv_data_type, o_data_type), sm_scale,
        )  # fmt: skip
        if not self._fixed:
            self._indptr, self._indices, self._last = indptr.clone(), indices.clone(), last_page_len.clone()
            return
        assert len(last_page_len) == len(self._last), "the number of rows of a graph is fixed"
        assert len(indices) <= len(self._indices)
        self._indptr.copy_(indptr)
        self._last.copy_(last_page_len)
        self._indices.fill_(-(1 << 30))
        self._indices[: len(indices)].copy_(indices)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Tensor:
        assert not args
        _are_defaults(
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, lse=lse, return_lse=return_lse,
            enable_pdl=enable_pdl, window_left=window_left, sinks=sinks, kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )  # fmt: skip
        assert q_len_per_req is None
        return self._run(q, paged_kv_cache, torch.ones_like(self._last), False, out)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        assert not use_cuda_graph
        _are_defaults(
            qo_indptr_buf=qo_indptr_buf, paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf, custom_mask_buf=custom_mask_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf, mask_indptr_buf=mask_indptr_buf,
            jit_args=jit_args, jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask,
        )  # fmt: skip
        self._begin(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        _are_defaults(
            head_dim_vo=head_dim_vo, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask,
            pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction,
            rope_scale=rope_scale, rope_theta=rope_theta, prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr, seq_lens=seq_lens, seq_lens_q=seq_lens_q,
            block_tables=block_tables, max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv, fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv, uniform_q_len=uniform_q_len,
        )  # fmt: skip
        assert non_blocking
        self._planned(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size), window_left, logits_soft_cap,
            (q_data_type, kv_data_type, o_data_type), sm_scale,
        )  # fmt: skip
        assert qo_indptr.dtype == torch.int32
        assert qo_indptr.device.type == "cpu"
        assert len(qo_indptr) == len(paged_kv_indptr)
        assert qo_indptr[0] == 0
        self._counts, self._causal = qo_indptr.diff(), causal
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert bool((self._counts >= 1).all())
        assert bool((lengths >= self._counts).all())
        self._indptr, self._indices = paged_kv_indptr.clone(), paged_kv_indices.clone()
        self._last = paged_kv_last_page_len.clone()

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor:
        assert not args
        _are_defaults(
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, lse=lse, return_lse=return_lse,
            lse_base=lse_base, lse_layout=lse_layout, enable_pdl=enable_pdl, window_left=window_left,
            sinks=sinks, kv_cache_sf=kv_cache_sf, use_fp16_softmax=use_fp16_softmax,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            uses_spcompress=uses_spcompress,
        )  # fmt: skip
        return self._run(q, paged_kv_cache, self._counts, self._causal, out)
