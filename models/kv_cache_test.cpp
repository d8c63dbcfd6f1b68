#include "models/kv_cache.hpp"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace tw::models {
namespace {

constexpr int kPage = KvPool::kPageTokens;

std::shared_ptr<KvPool> make_pool(int pages) {
  return std::make_shared<KvPool>(2, 3, 64, pages, DType::f32, Stream::standard(Device::cpu()));
}

TEST(KvCache, TakesPagesAsItGrowsAndReturnsThem) {
  const auto pool = make_pool(5);
  {
    KvCache a(pool), b(pool);
    EXPECT_TRUE(a.reserve(0));
    EXPECT_EQ(pool->free_pages(), 5);
    EXPECT_TRUE(a.reserve(1));
    EXPECT_TRUE(b.reserve(kPage + 1));
    EXPECT_EQ(pool->free_pages(), 2);
    EXPECT_TRUE(a.reserve(kPage));  // in the page that it has
    EXPECT_EQ(pool->free_pages(), 2);
    EXPECT_EQ(a.capacity(), kPage);
    EXPECT_TRUE(a.reserve(3));
    EXPECT_EQ(a.capacity(), kPage);  // never less
    std::set<int> pages(a.pages().begin(), a.pages().end());
    pages.insert(b.pages().begin(), b.pages().end());
    EXPECT_EQ(pages.size(), 3u);  // none twice
  }
  EXPECT_EQ(pool->free_pages(), 5);
}

TEST(KvCache, RefusesWhatThePoolDoesNotHave) {
  const auto pool = make_pool(3);
  KvCache a(pool), b(pool);
  EXPECT_TRUE(a.reserve(2 * kPage));
  EXPECT_FALSE(b.reserve(kPage + 1));
  EXPECT_EQ(b.capacity(), 0);
  EXPECT_EQ(pool->free_pages(), 1);
  EXPECT_TRUE(b.reserve(kPage));
  EXPECT_FALSE(a.reserve(2 * kPage + 1));
  EXPECT_EQ(a.capacity(), 2 * kPage);
}

TEST(KvCache, MovesWithItsPages) {
  const auto pool = make_pool(2);
  KvCache a(pool);
  ASSERT_TRUE(a.reserve(1));
  a.length = 1;
  {
    const KvCache b = std::move(a);
    EXPECT_EQ(b.pages().size(), 1u);
    EXPECT_EQ(b.length, 1);
    EXPECT_EQ(pool->free_pages(), 1);
  }
  EXPECT_EQ(pool->free_pages(), 2);
}

TEST(KvPool, KeysAndValuesOfATokenFollowEachOther) {
  const auto pool = make_pool(4);
  const Tensor keys = pool->keys(1), values = pool->values(1);
  EXPECT_EQ(keys.shape(), (Shape{5, kPage, 3, 64}));
  EXPECT_EQ(values.data<float>() - keys.data<float>(), 3 * 64);
  EXPECT_EQ(keys.data<float>() - pool->keys(0).data<float>(), 5 * kPage * 2 * 3 * 64);
  EXPECT_EQ(pool->spare_page(), 4);
  KvCache all(pool);
  ASSERT_TRUE(all.reserve(4 * kPage));
  for (const int page : all.pages()) EXPECT_NE(page, pool->spare_page());
  EXPECT_EQ(pool->pages_for(0), 0);
  EXPECT_EQ(pool->pages_for(kPage), 1);
  EXPECT_EQ(pool->pages_for(kPage + 1), 2);
}

}  // namespace
}  // namespace tw::models
