// Compares a kernel, or a functor of a user's own, with its declaration in Python while it
// compiles. Compiles as CUDA and as plain C++17, as rules do.
#pragma once

// The offset of a struct's field; the struct's name, which may have commas, comes last. NVRTC 12
// has no __builtin_offsetof, and no NVRTC has offsetof.
#if defined(__CUDACC_RTC__)
#define GPUOPT_OFFSET(field, ...) __INTADDR__(&((__VA_ARGS__*)nullptr)->field)
#else
#define GPUOPT_OFFSET(field, ...) __builtin_offsetof(__VA_ARGS__, field)
#endif

namespace gpuopt {

// Whether a type is the declared one. Python does not declare which memory is only read.
template <class Type, class Declared>
constexpr bool is_declared = false;
template <class Type>
constexpr bool is_declared<Type, Type> = true;
template <class Type>
constexpr bool is_declared<const Type*, Type*> = true;

template <class Function>
constexpr int num_parameters = -1;
template <class... Parameters>
constexpr int num_parameters<void(Parameters...)> = sizeof...(Parameters);

// Whether a function's parameter number `position` is the declared one.
template <int position, class Function, class Declared>
constexpr bool takes = false;
template <class First, class... Rest, class Declared>
constexpr bool takes<0, void(First, Rest...), Declared> = is_declared<First, Declared>;
template <int position, class First, class... Rest, class Declared>
constexpr bool takes<position, void(First, Rest...), Declared> =
    takes<position - 1, void(Rest...), Declared>;

}  // namespace gpuopt
