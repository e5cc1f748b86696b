// CUDA for a CPU build of torch: what torch asks of the device, and kernels that are the CPU's.
#include "cards.h"
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace fake_cuda {

// --- generators: the CPU's, which call themselves a card's

constexpr uint64_t kDefaultSeed = 67280421310721;

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int card) : at::CPUGeneratorImpl(kDefaultSeed) { be_of_card(card); }
  void be_of_card(int card) {
    device_ = c10::Device(c10::DeviceType::CUDA, card);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
  void be_of_cpu() {
    device_ = c10::Device(c10::DeviceType::CPU);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CPU);
  }
};

at::Generator& default_generator(int card) {
  static at::Generator generators[kMostCards];
  if (!generators[card].defined()) generators[card] = at::make_generator<Generator>(card);
  return generators[card];
}

// While it is not negative, a new generator is the default one of this card: torch.cuda asks so.
int default_wanted = -1;

// --- what torch asks of CUDA

// Registered by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  static int card_or_current(c10::DeviceIndex card) { return card < 0 ? current_card : card; }
  static c10::DeviceIndex exchange(c10::DeviceIndex card) {
    const int before = current_card;
    if (card >= 0) current_card = card;
    return before;
  }
  void init() const override { use(current_card); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count_cards() > 0; }
  bool hasCUDA() const override { return count_cards() > 0; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_initialized(); }
  c10::DeviceIndex deviceCount() const override { return count_cards(); }
  int getNumGPUs() const override { return count_cards(); }
  c10::DeviceIndex current_device() const override { return current_card; }
  c10::DeviceIndex getCurrentDevice() const override { return current_card; }
  void setCurrentDevice(c10::DeviceIndex card) const override { use(card); current_card = card; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex card) const override { return exchange(card); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex card) const override { return exchange(card); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &card_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(current_card)}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex card) const override {
    return default_generator(card_or_current(card));
  }
  at::Generator getNewGenerator(c10::DeviceIndex card) const override {
    if (default_wanted >= 0) return default_generator(std::exchange(default_wanted, -1));
    return at::make_generator<Generator>(card_or_current(card));
  }
  void deviceSynchronize(c10::DeviceIndex card) const override {
    report("wait", "synchronize", 0, card);
    wait_for(card);
  }
  std::string showConfig() const override { return "emulated"; }
};

}  // namespace fake_cuda

namespace at {
using fake_cuda::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace fake_cuda {

struct Event {
  int card;
  double time;
  int64_t last_copy;
};

// The current card, and streams and events: each card has one stream.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device_of(int card) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(card)}; }
  static c10::Stream stream_of(c10::Device device) {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : device_of(current_card));
  }
  static void check_exists(c10::Device device) {
    TORCH_CHECK(device.index() < count_cards(), "CUDA error: invalid device ordinal");
  }
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return count_cards(); }
  c10::Device getDevice() const override { return device_of(current_card); }
  void setDevice(c10::Device device) const override {
    check_exists(device);
    // CUDA creates a context here.
    TORCH_CHECK(total_bytes(device.index()) > 0, "CUDA error: out of memory");
    current_card = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_card = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = device_of(current_card);
    if (device.has_index()) setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return stream_of(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return stream_of(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream& stream) const override { return busy_until(stream.device_index()) <= now(); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronizeDevice(stream.device_index()); }
  void synchronizeDevice(const c10::DeviceIndex given) const override {
    const int card = CUDAHooks::card_or_current(given);
    report("wait", "synchronize", 0, card);
    wait_for(card);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const int card = stream.device_index();
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {card, std::max(busy_until(card), now()), num_copies.load()};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Event*>(event)->time <= now(); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Event& recorded = *static_cast<Event*>(event);
    report("wait", "event", 0, recorded.card);
    wait_until(recorded.card, recorded.time, recorded.last_copy);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return (static_cast<Event*>(second)->time - static_cast<Event*>(first)->time) * 1e3;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

const bool is_allocator_set = (c10::SetAllocator(c10::DeviceType::CUDA, &card_allocator, 100), true);

// --- operators that make tensors or views

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &card_allocator, kKeys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &card_allocator, kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  int64_t num_elements = 1;
  for (const auto length : C10_AS_INTARRAYREF_SLOW(size)) num_elements *= length;
  const size_t needed = (num_elements + self.storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes()) {  // for outputs of operators, whose content is not kept
    c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(card_allocator.allocate(needed));
    storage->set_nbytes(needed);
  }
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  return at::cpu::set_(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                       C10_AS_INTARRAYREF_SLOW(stride));
}
void record_stream(at::Tensor&, c10::Stream) {}

// --- copies

// A tensor on a card as one of the CPU with the same memory; `Opened` must contain it.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  at::Tensor alias = tensor.numel() == 0
                         ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                         : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// Whether a copy reads or writes page-locked memory directly. With another dtype or other strides,
// CUDA copies from or to a temporary tensor, whose memory is pageable.
bool is_direct(const at::Tensor& host, const at::Tensor& other) {
  if (host.numel() == 0) return true;
  const bool same_strides = host.strides() == other.strides() && host.is_non_overlapping_and_dense();
  return host.dtype() == other.dtype() && (host.is_contiguous() || same_strides) && is_pinned(host.data_ptr());
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  const at::Tensor source = given.sizes() == self.sizes() ? given : given.expand_as(self);
  const bool to_host = !self.is_cuda(), from_host = !source.is_cuda();
  const int card = to_host ? source.device().index() : self.device().index();
  const int64_t num_bytes = self.numel() * self.element_size();
  use(card);
  bool is_async = false;
  if (!to_host && !from_host) {
    const bool same_card = self.device() == source.device();
    report(same_card ? "copy on card" : "copy between cards", "copy_", num_bytes, card, false, false);
    launch(card);
  } else {
    const bool pinned = is_direct(to_host ? self : source, to_host ? source : self);
    is_async = pinned && non_blocking;
    report(to_host ? "copy to host" : "copy to card", "copy_", num_bytes, card, pinned, !is_async);
    if (from_host) launch(card);
    if (!is_async && depth == 0) wait_for(card);
  }
  Opened opened;
  opened.add(self);
  opened.add(source);
  at::Tensor target = on_host(self);
  const at::Tensor values = on_host(source);
  Inside inside;
  if (!is_async || source.numel() == 0 || depth > 1) {
    target.copy_(values);
  } else if (to_host) {
    at::Tensor snapshot = at::empty_like(target);
    snapshot.copy_(values);
    if (target.is_contiguous()) std::memset(target.data_ptr(), 0xCD, num_bytes);
    add_pending(card, self, snapshot, true);
  } else {
    target.copy_(values);
    add_pending(card, source, source.clone(), false);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::native::resize_(target, self.sizes());
  return const_cast<at::Tensor&>(target).copy_(self);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const int card = self.device().index();
  report("wait", "item", self.element_size(), card);
  use(card);
  if (depth == 0) wait_for(card);
  Opened opened;
  opened.add(self);
  Inside inside;
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

int64_t fused_sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;  // attention by matrix products
}

// --- convolutions, whose kernels for CPUs without MKL-DNN are slow, and wrong for 1x1 in channels-last

at::Tensor float_on_host(const at::Tensor& tensor, Opened& opened) {
  opened.add(tensor);
  return on_host(tensor).to(at::kFloat);
}

at::Tensor conv2d_forward(const at::Tensor& self, const at::Tensor& weight, c10::SymIntArrayRef,
                          const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding) {
  launch_kernel(self.device().index(), "aten::convolution");
  Opened opened;
  Inside inside;
  const at::Tensor shift = bias && bias->defined() ? float_on_host(*bias, opened) : at::Tensor();
  return at::conv2d(float_on_host(self, opened), float_on_host(weight, opened), shift, C10_AS_INTARRAYREF_SLOW(stride),
                    C10_AS_INTARRAYREF_SLOW(padding)).to(self.device(), self.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> conv2d_backward(
    const at::Tensor& gradient, const at::Tensor& self, const at::Tensor& weight, c10::SymIntArrayRef,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, std::array<bool, 3> wanted) {
  launch_kernel(self.device().index(), "aten::convolution_backward");
  Opened opened;
  Inside inside;
  auto found = at::convolution_backward(
      float_on_host(gradient, opened), float_on_host(self, opened), float_on_host(weight, opened), weight.size(0),
      C10_AS_INTARRAYREF_SLOW(stride), C10_AS_INTARRAYREF_SLOW(padding), {1, 1}, false, {0, 0}, 1, wanted);
  const auto moved = [&](const at::Tensor& part) {
    return part.defined() ? part.to(self.device(), self.scalar_type()) : part;
  };
  return {moved(std::get<0>(found)), moved(std::get<1>(found)), moved(std::get<2>(found))};
}

// --- all other operators: the CPU's kernel, with the checks of CUDA

using Arguments = std::vector<c10::Argument>;

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

bool is_indexing(const std::string& name) {
  return starts_with(name, "aten::index") || starts_with(name, "aten::_index_put") ||
         starts_with(name, "aten::_unsafe_index");
}

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& part : value.toListRef()) for_each_tensor(part, function);
  }
}

// Return the card of an operator's tensors; an error if they are on several devices. Numbers in
// tensors without dimensions may be on the host, and so may indices, which are copied.
int card_of(const std::string& name, const Arguments& arguments, const c10::IValue* values) {
  int card = -1;
  std::string mixed;
  for (size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(values[i], [&](const at::Tensor& tensor) {
      if (tensor.is_cuda()) {
        if (card < 0) card = tensor.device().index();
        if (tensor.device().index() != card)
          mixed = arguments[i].name() + " is on " + tensor.device().str() + ", other tensors on cuda:" + std::to_string(card);
      } else if (tensor.is_cpu() && tensor.dim() > 0) {
        mixed = arguments[i].name() + " is on cpu";
      }
    });
  }
  if (card < 0) card = current_card;
  if (!mixed.empty() && is_indexing(name)) report("copy to card", "indices", 0, card);
  else TORCH_CHECK(mixed.empty(), "Expected all tensors to be on the same device, but ", mixed, " (", name, ")");
  return card;
}

// CUDA's fused optimizers refuse tensors of a parameter whose strides differ; the CPU's do not.
void check_fused_strides(const Arguments& arguments, const c10::IValue* values) {
  std::vector<std::vector<at::Tensor>> lists;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& name = arguments[i].name();
    if (values[i].isTensorList() && name != "state_steps") lists.push_back(values[i].toTensorVector());
  }
  for (const auto& list : lists) {
    for (size_t i = 0; i < list.size(); ++i) {
      for (int64_t k = 0; k < list[i].dim(); ++k) {
        TORCH_CHECK(list[i].size(k) == 1 || list[i].stride(k) == lists[0][i].stride(k),
                    "Expected check_fast_path_restrictions({params, grads, ...}) to be true, but got "
                    "false. (strides of a parameter, its gradient and its state differ)");
      }
    }
  }
}

// The size or the value of what these return depends on data, so the host waits on CUDA, too.
bool waits(const std::string& name, const Arguments& arguments, const c10::IValue* values) {
  for (const char* known : {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::equal",
                            "aten::is_nonzero", "aten::bincount", "aten::repeat_interleave"}) {
    if (name == known) return true;
  }
  bool has_mask = false;
  for (size_t i = 1; is_indexing(name) && i < arguments.size(); ++i) {
    if (!values[i].isList()) continue;
    for_each_tensor(values[i], [&](const at::Tensor& tensor) { has_mask |= tensor.scalar_type() == at::kBool; });
  }
  return has_mask;
}

// Lets an operator draw from a card's generator: CPU kernels take generators of the CPU only.
class RandomNumbers {
 public:
  RandomNumbers(const c10::OperatorHandle& op, const Arguments& arguments, c10::IValue* values, int card) : card_(card) {
    bool takes_generator = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (values[i].isNone() && arguments[i].name() == "generator") values[i] = c10::IValue(default_generator(card));
      if (!values[i].isGenerator()) continue;
      takes_generator = true;
      const at::Generator generator = values[i].toGenerator();
      if (!generator.defined() || !generator.device().is_cuda()) continue;
      lent_.push_back(static_cast<Generator*>(generator.unsafeGetGeneratorImpl()));
      lent_.back()->be_of_cpu();
    }
    if (takes_generator || !op.hasTag(at::Tag::nondeterministic_seeded)) return;
    // Such as dropout, which draws from the default generator of the CPU.
    host_state_ = host_->get_state();
    host_->set_state(*default_generator(card_).unsafeGetGeneratorImpl()->get_state());
  }
  ~RandomNumbers() {
    for (Generator* generator : lent_) generator->be_of_card(card_);
    if (!host_state_) return;
    default_generator(card_).unsafeGetGeneratorImpl()->set_state(*host_->get_state());
    host_->set_state(*host_state_);
  }

 private:
  int card_;
  std::vector<Generator*> lent_;
  c10::GeneratorImpl* host_ = at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
  c10::intrusive_ptr<c10::TensorImpl> host_state_;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::Stack* stack) {
  const std::string& name = op.schema().name();
  const Arguments& arguments = op.schema().arguments();
  c10::IValue* values = stack->data() + stack->size() - arguments.size();
  const int card = card_of(name, arguments, values);
  if (starts_with(name, "aten::_fused_")) check_fused_strides(arguments, values);
  launch_kernel(card, name.c_str());
  if (waits(name, arguments, values)) {
    report("wait", name.c_str(), 0, card);
    if (depth == 0) wait_for(card);
  }
  Opened opened;
  if (name == "aten::native_batch_norm") {  // writes running statistics, which its schema hides
    for (size_t i : {3, 4}) {
      if (!values[i].isTensor() || !values[i].toTensor().defined()) continue;
      opened.add(values[i].toTensor());
      values[i] = c10::IValue(on_host(values[i].toTensor()));
    }
  }
  Inside inside;
  RandomNumbers random(op, arguments, values, card);
  const c10::DeviceGuard guard(c10::Device(c10::DeviceType::CUDA, card));
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("record_stream", record_stream);
  library.impl("copy_", copy_);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("_slow_conv2d_forward", conv2d_forward);
  library.impl("_slow_conv2d_backward.output_mask", conv2d_backward);
  library.impl("_fused_sdp_choice", fused_sdp_choice);
}

}  // namespace fake_cuda

// --- for emulated_cuda.py; exceptions cannot cross, so errors are numbers

using namespace fake_cuda;

extern "C" {
void fake_set_reporter(Reporter function) { reporter = function; }
void fake_report_kernels(int wanted) { reports_kernels = wanted != 0; }
int fake_count() { return count_cards(); }
int fake_number_in_machine(int card) { return visible().at(card); }
const char* fake_uuid(int card) {
  static const auto names = uuids();
  return names[visible().at(card)].c_str();
}
int fake_is_initialized() { return is_initialized(); }
int fake_current() { return current_card; }
int fake_exchange(int card) { return CUDAHooks::exchange(card); }
int fake_is_bad_fork() { return initialized_in.load() != 0 && !is_initialized(); }
void fake_init() { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); }
void fake_want_default_generator(int card) { default_wanted = card; }
int64_t fake_total_bytes(int card) { return total_bytes(card); }
int64_t fake_used_bytes(int card) { return used_bytes[card]; }
int64_t fake_peak_bytes(int card) { return peak_bytes[card]; }
void fake_reset_peak(int card) { card_allocator.resetPeakStats(card); }
int fake_synchronize(int card) {
  if (has_failed[card]) return kDeviceAssert;
  report("wait", "synchronize", 0, card);
  wait_for(card);
  return kSuccess;
}
int fake_register_host(void* begin, size_t size) { return register_host(static_cast<char*>(begin), size); }
int fake_unregister_host(void* begin) { return unregister_host(static_cast<char*>(begin)); }
}
