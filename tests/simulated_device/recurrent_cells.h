// The cells of LSTM and GRU, which torch asks an accelerator for and the host's kernels lack: made of other operators.
#pragma once
#include "operators.h"

namespace sim {

using Optional = std::optional<at::Tensor>;

inline at::Tensor with(const at::Tensor& gates, const Optional& bias) { return bias && bias->defined() ? gates + *bias : gates; }
inline at::Tensor slope(const at::Tensor& sigmoid) { return sigmoid * (1 - sigmoid); }

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell,
    const Optional& input_bias, const Optional& hidden_bias) {
  auto gates = (with(input, input_bias) + with(hidden, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), change = gates[2].tanh(), out = gates[3].sigmoid();
  auto next = forget * cell + in * change;
  return {out * next.tanh(), next, at::cat({in, forget, change, out}, 1)};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const Optional& output_gradient, const Optional& next_gradient, const at::Tensor& cell,
    const at::Tensor& next, const at::Tensor& kept, bool has_bias) {
  if (!(output_gradient && output_gradient->defined()) && !(next_gradient && next_gradient->defined())) return {};
  auto gates = kept.chunk(4, 1);
  auto &in = gates[0], &forget = gates[1], &change = gates[2], &out = gates[3];
  auto squashed = next.tanh(), of_output = output_gradient && output_gradient->defined() ? *output_gradient : at::zeros_like(next);
  auto of_next = of_output * out * (1 - squashed * squashed);
  if (next_gradient && next_gradient->defined()) of_next = of_next + *next_gradient;
  auto of_gates = at::cat({of_next * change * slope(in), of_next * cell * slope(forget), of_next * in * (1 - change * change), of_output * squashed * slope(out)}, 1);
  return {of_gates, of_next * forget, has_bias ? of_gates.sum(0) : at::Tensor()};
}

inline std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& state, const Optional& input_bias,
    const Optional& hidden_bias) {
  auto ins = with(input, input_bias).chunk(3, 1), hiddens = with(hidden, hidden_bias).chunk(3, 1);
  auto reset = (ins[0] + hiddens[0]).sigmoid(), keep = (ins[1] + hiddens[1]).sigmoid(), change = (ins[2] + reset * hiddens[2]).tanh();
  return {change + keep * (state - change), at::cat({reset, keep, change, state, hiddens[2]}, 1)};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& gradient, const at::Tensor& kept, bool has_bias) {
  auto parts = kept.chunk(5, 1);
  auto &reset = parts[0], &keep = parts[1], &change = parts[2], &state = parts[3], &hidden = parts[4];
  auto of_change = gradient * (1 - keep) * (1 - change * change);
  auto of_reset = of_change * hidden * slope(reset), of_keep = gradient * (state - change) * slope(keep);
  auto of_input = at::cat({of_reset, of_keep, of_change}, 1), of_hidden = at::cat({of_reset, of_keep, of_change * reset}, 1);
  at::Tensor none;
  return {of_input, of_hidden, gradient * keep, has_bias ? of_input.sum(0) : none, has_bias ? of_hidden.sum(0) : none};
}

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", sim::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", sim::lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", sim::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", sim::gru_cell_backward);
}
