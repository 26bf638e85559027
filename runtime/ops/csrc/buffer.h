// Memory for intermediate results: grows, is never shrunk, and starts at a cache line. Growing loses what was there.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace llmserve {

template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    void reserve(int64_t size) {
        if (size <= size_) return;
        std::free(data_);
        data_ = static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64));
        if (!data_) throw std::bad_alloc();
        size_ = size;
    }

    T* data() { return data_; }
    const T* data() const { return data_; }

  private:
    T* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace llmserve
