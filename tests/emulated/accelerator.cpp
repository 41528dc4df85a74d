// An accelerator in a CPU's memory, with two devices: every operation runs on the CPU, and its tensors must be where a
// real accelerator would want them. What each stream reads and writes, and what orders streams, is written down, so that
// races.py can find what a real one would do at the same time. Registered for torch's PrivateUse1 key.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr auto KEY = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 2;
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[DEVICES] = {0, 0};
std::atomic<c10::StreamId> streams_made{0};
std::atomic<int64_t> events_made{0};

// The journal: what happened, in the order in which the host asked for it. `which` is an address or an event's number.

using Happened = std::tuple<std::string, int64_t, int64_t, int64_t, std::string>;
std::mutex journal_lock;
std::vector<Happened> journal;
// Copies within an operation that the CPU takes over are not the device's
thread_local bool inside = false;

void note(const char* what, int64_t which, c10::DeviceIndex device, c10::StreamId stream, const std::string& op = "") {
  std::lock_guard<std::mutex> hold(journal_lock);
  journal.emplace_back(what, which, device, stream, op);
}

std::vector<Happened> take_journal() {
  std::lock_guard<std::mutex> hold(journal_lock);
  return std::exchange(journal, {});
}

int64_t address(const void* memory) { return reinterpret_cast<int64_t>(memory); }

int64_t memory_of(const at::Tensor& t) { return address(t.storage().data()); }

bool has_memory(const at::Tensor& t) {
  return t.defined() && t.device().type() == KEY && t.has_storage() && t.storage().data();
}

void note_use(const char* what, const at::Tensor& t, const std::string& op) {
  if (!inside && has_memory(t))
    note(what, memory_of(t), t.device().index(), streams[t.device().index()], op);
}

// The second stream does nothing more before what the first was asked for until now is done
void order(c10::Device first, c10::Device second) {
  auto event = ++events_made;
  note("record", event, first.index(), streams[first.index()]);
  note("block", event, second.index(), streams[second.index()]);
}

void set_current(c10::DeviceIndex index) {
  TORCH_CHECK(0 <= index && index < DEVICES, "emulated: invalid device ordinal ", index);
  current = index;
}

// Memory

void free_memory(void* memory) {
  if (memory)
    note("free", address(memory), 0, 0);
  std::free(memory);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    if (memory)
      note("allocate", address(memory), current, streams[current]);
    return {memory, memory, &free_memory, c10::Device(KEY, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;

// Devices and streams

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KEY; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    set_current(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {KEY, current}; }
  void setDevice(c10::Device device) const override { set_current(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    auto index = device.has_index() ? device.index() : current;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KEY, index), streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : getDevice(), ++streams_made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  // Work is done when the call returns, so there is nothing to wait for
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event)
      *event = reinterpret_cast<void*>(static_cast<int64_t>(++events_made));
    note("record", address(*event), stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    note("block", address(event), stream.device_index(), stream.id());
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    note("keep", address(memory.get()), stream.device_index(), stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    note("wait for stream", 0, stream.device_index(), stream.id());
  }
  void synchronizeEvent(void* event) const override { note("wait for event", address(event), 0, 0); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { note("wait for device", 0, device, 0); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current;
    set_current(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
};

// Operations

bool devices_may_mix(const std::string& name) {
  // These take tensors of several devices on CUDA, too
  return name == "aten::copy_" || name == "aten::_to_copy" || name == "aten::_copy_from";
}

void check_one_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto name = op.schema().name();
  if (devices_may_mix(name))
    return;
  std::optional<c10::Device> seen;
  bool indexing = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
  auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  auto check = [&](const at::Tensor& t, bool index) {
    // A number without dimensions, and an index tensor, may be on the CPU
    if (!t.defined() || (t.device().is_cpu() && (t.dim() == 0 || index)))
      return;
    TORCH_CHECK(!seen || *seen == t.device(), "emulated: expected all tensors to be on the same device, but ", name,
                " found at least two devices, ", *seen, " and ", t.device());
    seen = t.device();
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    if (argument.isTensor())
      check(argument.toTensor(), false);
    else if (argument.isTensorList())
      for (const auto& t : argument.toTensorVector())
        check(t, false);
    else if (argument.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : argument.toOptionalTensorList())
        check(t.value_or(at::Tensor()), indexing);
  }
}

void note_arguments(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values,
                    const std::vector<c10::Argument>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto* alias = arguments[i].alias_info();
    const char* what = alias && alias->isWrite() ? "write" : "read";
    if (values[i].isTensor())
      note_use(what, values[i].toTensor(), schema.name());
    else if (values[i].isTensorList())
      for (const auto& t : values[i].toTensorVector())
        note_use(what, t, schema.name());
    else if (values[i].isList())
      for (const c10::IValue& each : values[i].toListRef())
        if (each.isTensor())
          note_use(what, each.toTensor(), schema.name());
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_one_device(op, stack);
  const auto& schema = op.schema();
  bool outermost = !std::exchange(inside, true);
  std::vector<c10::IValue> given = torch::jit::last(*stack, schema.arguments().size()).vec();
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    inside = !outermost;
    throw;
  }
  inside = !outermost;
  note_arguments(schema, given, schema.arguments());
  for (const c10::IValue& result : torch::jit::last(*stack, schema.returns().size()).vec())
    if (result.isTensor())
      note_use("write", result.toTensor(), schema.name());
    else if (result.isTensorList())
      for (const auto& t : result.toTensorVector())
        note_use("write", t, schema.name());
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                               std::optional<c10::Device> device, std::optional<bool>,
                               std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(KEY, current));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(KEY, current));
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU
at::Tensor on_cpu(const at::Tensor& t) {
  if (t.device().is_cpu())
    return t;
  auto options = t.options().device(c10::kCPU);
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), [t](void*) {}, options);
}

// As CUDA does: between devices on the source's stream, after all that the destination's was asked for, which waits
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool there = from.device().type() == KEY, here = to.device().type() == KEY;
  bool between = there && here && from.device() != to.device();
  if (!inside && between)
    order(to.device(), from.device());
  note_use("read", from, "aten::copy_");
  if (!inside && between && has_memory(to))
    note("write", memory_of(to), from.device().index(), streams[from.device().index()], "aten::copy_");
  else
    note_use("write", to, "aten::copy_");
  if (!inside && between)
    order(from.device(), to.device());
  if (!inside && there && !here && !non_blocking)
    note("wait for stream", 0, from.device().index(), streams[from.device().index()]);
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  note("keep", memory_of(self), stream.device_index(), stream.id());
}

at::Scalar local_scalar_dense(const at::Tensor& t) {
  note_use("read", t, "aten::item");
  if (!inside)
    note("wait for stream", 0, t.device().index(), streams[t.device().index()]);
  return on_cpu(t).item();
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes)
    return self;
  auto bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  auto storage = self.storage();
  if (bytes > storage.nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto memory = allocator.allocate(bytes);
    if (storage.nbytes())
      std::memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(memory));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                    offset.expect_int());
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, storage, 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

// What the CPU has no kernel of that name for

using at::Tensor;
using Bias = const std::optional<Tensor>&;

Tensor gates_of(const Tensor& input_gates, const Tensor& hidden_gates, Bias input_bias, Bias hidden_bias) {
  auto gates = input_gates + hidden_gates;
  return input_bias && input_bias->defined() ? gates + *input_bias + *hidden_bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             Bias input_bias, Bias hidden_bias) {
  auto gates = gates_of(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(Bias grad_hy, Bias grad_cy, const Tensor& cx, const Tensor& cy,
                                                      const Tensor& workspace, bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  auto i = gates[0], f = gates[1], g = gates[2], o = gates[3], t = cy.tanh();
  auto of_h = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  auto of_c = of_h * o * (1 - t * t);
  if (grad_cy && grad_cy->defined())
    of_c = of_c + *grad_cy;
  auto grad = at::cat({of_c * g * i * (1 - i), of_c * cx * f * (1 - f), of_c * i * (1 - g * g), of_h * t * o * (1 - o)}, 1);
  return {grad, of_c * f, has_bias ? grad.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    Bias input_bias, Bias hidden_bias) {
  bool biased = input_bias && input_bias->defined();
  auto of_input = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
  auto of_hidden = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  auto r = (of_input[0] + of_hidden[0]).sigmoid(), z = (of_input[1] + of_hidden[1]).sigmoid();
  auto n = (of_input[2] + r * of_hidden[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, of_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  auto r = kept[0], z = kept[1], n = kept[2], hx = kept[3], hidden_n = kept[4];
  auto of_z = grad_hy * (hx - n) * z * (1 - z);
  auto of_n = grad_hy * (1 - z) * (1 - n * n);
  auto of_r = of_n * hidden_n * r * (1 - r);
  auto input = at::cat({of_r, of_z, of_n}, 1), hidden = at::cat({of_r, of_z, of_n * r}, 1);
  return {input, hidden, grad_hy * z, has_bias ? input.sum(0) : Tensor(), has_bias ? hidden.sum(0) : Tensor()};
}

Tensor convolution(const Tensor& input, const Tensor& weight, Bias bias, at::IntArrayRef stride, at::IntArrayRef padding,
                   at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  std::optional<Tensor> bias_there;
  if (bias && bias->defined())
    bias_there = on_cpu(*bias);
  auto out = at::convolution(on_cpu(input), on_cpu(weight), bias_there, stride, padding, dilation, transposed,
                             output_padding, groups);
  note_use("read", input, "aten::convolution");
  note_use("read", weight, "aten::convolution");
  return out.to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  std::vector<int64_t> bias_size = {grad.size(1)};
  auto [of_input, of_weight, of_bias] =
      at::convolution_backward(on_cpu(grad), on_cpu(input), on_cpu(weight), at::IntArrayRef(bias_size), stride, padding,
                               dilation, transposed, output_padding, groups, wanted);
  auto there = [&](const Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {there(of_input), there(of_weight), there(of_bias)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// Autocast with CUDA's lists of operations

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define NARROW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDE_SUM(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(NARROW)
  AT_FORALL_FP32(WIDE)
  AT_FORALL_FP32_SET_OPT_DTYPE(WIDE_SUM)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  c10::SetAllocator(KEY, &allocator);
  m.def("take_journal", &take_journal);
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
}
